"""Train the factors of a compressed model under torch.compile: they are ordinary parameters.

A few steps win back part of what the truncation lost. The compiled step is one graph: each
SVDLinear is one op in it, forward and backward.
"""

import torch
from torch import nn

from neuronmm_ops import SVDConfig, SVDLinear, compress_

STEPS = 60


def main() -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
    student = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
    student.load_state_dict(teacher.state_dict())
    inputs = torch.randn(2048, 32)
    target = teacher(inputs).detach()

    report = compress_(student, SVDConfig(ratio=0.5, block=8, targets="all-linear"), [inputs])
    assert all(isinstance(student[i], SVDLinear) for i in (0, 2))
    print(f"{report.effective_ratio:.1%} of the parameters removed")

    step = torch.compile(
        lambda x: (student(x) - target).square().mean(), fullgraph=True, backend="aot_eager"
    )
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step(inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"error after compression {losses[0]:.4f}, after {STEPS} steps {losses[-1]:.4f}")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
