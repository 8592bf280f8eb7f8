"""The same GPT in PyTorch's `torch.distributed.pipelining`: one process per stage, gloo, on the CPU.

Started by `run.py`; `TorchCase` speaks with it. Reads numbers of steps from standard input, answers the seconds of one step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

WIDTH, HEADS, DEPTH, VOCABULARY, LENGTH, BATCH = 256, 4, 4, 512, 128, 16


class TorchCase:
    """PyTorch in processes of its own.

    Args:
        python: an interpreter that has PyTorch.
        stages: how many processes.
        microbatches: parts of a batch; 1 with one stage is a plain step.
        port: for their meeting on 127.0.0.1.
    """

    def __init__(self, python: str, stages: int, microbatches: int, port: int):
        self._processes = [
            subprocess.Popen(
                [python, __file__, str(rank), str(stages), str(microbatches), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(stages)
        ]
        self.seconds(1)

    def seconds(self, steps: int) -> float:
        """Trains a number of steps; returns the seconds of one, of the slowest process."""
        for process in self._processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._processes]
        if not all(answers):
            raise RuntimeError(f"PyTorch ended with the exit codes {[process.wait() for process in self._processes]}.")
        return max(map(float, answers))

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.stdin.close()
            process.wait(timeout=60)


def main() -> None:
    """One process of a case."""
    import torch
    from torch import nn
    from torch.nn import functional

    rank, stages, microbatches, _ = map(int, sys.argv[1:])

    class Block(nn.Module):
        """Pre-norm attention and MLP, as in models/gpt.py."""

        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            shape = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
            q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
            h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(h.transpose(1, 2).reshape(x.shape))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    class Embeddings(nn.Module):
        """Tokens and positions."""

        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

        def forward(self, ids):
            return self.tokens(ids) + self.positions(torch.arange(LENGTH))

    torch.manual_seed(0)
    torch.set_num_threads(2)
    parts = [
        Embeddings(),
        *(Block() for _ in range(DEPTH)),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
    ]
    cut = [0, *(1 + DEPTH * (i + 1) // stages for i in range(stages - 1)), len(parts)]
    module = nn.Sequential(*parts[cut[rank] : cut[rank + 1]])
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    targets = ids.roll(-1, 1)

    def loss(output, target):
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    if stages > 1:
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        dist.init_process_group("gloo", rank=rank, world_size=stages)
        stage = PipelineStage(module, rank, stages, torch.device("cpu"))
        schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)

        def forward_and_backward() -> None:
            if rank == 0:
                schedule.step(ids)
            elif rank == stages - 1:
                schedule.step(target=targets)
            else:
                schedule.step()
    else:

        def forward_and_backward() -> None:
            for x, y in zip(ids.chunk(microbatches), targets.chunk(microbatches)):
                (loss(module(x), y) / microbatches).backward()

    for line in sys.stdin:
        steps = int(line)
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            forward_and_backward()
            optimizer.step()
        print((time.perf_counter() - start) / steps, flush=True)


if __name__ == "__main__":
    main()
