"""Library: runs programs with PyTorch's operators, on any device that PyTorch supports.

An executor plugin derives its executor from `djinn_plugins.executor.torch.executor.TorchExecutor` and adds what is
particular to its device; this library is no plugin and registers nothing.
"""
