"""How long a process takes from its imports to a model's first token: run as a program, it prints one line of JSON.

``python -m support.clients.first_token FOLDER [ADDRESS]``: with an address, on that server, which may have the weights.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

import torch
import transformers

PROMPT = torch.arange(5, 25)[None]


def main() -> None:
    """Load the model and generate."""
    folder, *address = sys.argv[1:]
    torch.set_num_threads(1)
    model_class = transformers.GPT2LMHeadModel  # imports its module
    device = "remote_accelerator:0" if address else "cpu"
    times = [perf_counter()]
    if address:
        import djinn

        times.append(perf_counter())
        djinn.init(server=address[0])
    times.append(perf_counter())
    model = model_class.from_pretrained(folder, **({"device_map": device} if address else {})).eval()
    times.append(perf_counter())
    tokens = model.generate(PROMPT.to(device), max_new_tokens=1, do_sample=False, pad_token_id=0)
    token = int(tokens[0, -1])
    times.append(perf_counter())
    print(json.dumps({"total": times[-1] - times[-4 if address else 0], "init": times[-3] - times[-4] if address else 0,
                      "load": times[-2] - times[-3], "token": times[-1] - times[-2],
                      "import": times[1] - times[0] if address else 0, "is": token}))


if __name__ == "__main__":
    main()
