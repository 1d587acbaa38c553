"""The form in which sparse tensors travel: operators on their components, which the executor rebuilds them from."""
