"""The training of weights.npz: ResNet-18 with an eighth of the channels, on pictures that `pictures.py` draws.

Needs torch and a few minutes on two cores. Running the example does not need it. Each batch normalization is folded
into its convolution, and the weights are stored as float16.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from pictures import SHAPES, labelled

EPOCHS = 12
PER_EPOCH = 8192  # pictures, newly drawn for each epoch
BATCH = 128


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.second_norm = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        if stride != 1 or inputs != outputs:
            self.skip, self.skip_norm = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        else:
            self.skip = None

    def forward(self, x: Any) -> Any:
        y = self.second_norm(self.second(torch.relu(self.first_norm(self.first(x)))))
        return torch.relu(y + (x if self.skip is None else self.skip_norm(self.skip(x))))


class ResNet(nn.Module):  # type: ignore[misc]
    """`forward` takes float32 (n, 3, 64, 64), from 0 to 1, and returns logits (n, 8)."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32, 64)) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0])
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks = []
        for stage, (inputs, outputs) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            blocks += [Block(inputs, outputs, 2 if stage else 1), Block(outputs, outputs, 1)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(widths[-1], len(SHAPES))

    def forward(self, x: Any) -> Any:
        x = self.pool(torch.relu(self.stem_norm(self.stem(x))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def folded(conv: Any, norm: Any, name: str) -> dict[str, np.ndarray[Any, Any]]:
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    weight = (conv.weight * scale[:, None, None, None]).detach().numpy()
    bias = (norm.bias - norm.running_mean * scale).detach().numpy()
    return {f"{name}.weight": weight.astype(np.float16), f"{name}.bias": bias.astype(np.float16)}


def weights_of(net: ResNet) -> dict[str, np.ndarray[Any, Any]]:
    weights = folded(net.stem, net.stem_norm, "stem")
    for number, block in enumerate(net.blocks):
        weights |= folded(block.first, block.first_norm, f"block{number}.first")
        weights |= folded(block.second, block.second_norm, f"block{number}.second")
        if block.skip is not None:
            weights |= folded(block.skip, block.skip_norm, f"block{number}.skip")
    for part in ("weight", "bias"):
        weights[f"head.{part}"] = getattr(net.head, part).detach().numpy().astype(np.float16)
    return weights


def tensors(count: int, rng: np.random.Generator) -> tuple[Any, Any]:
    images, labels = labelled(count, rng)
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(labels)


def main() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    net = ResNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, EPOCHS * PER_EPOCH // BATCH)
    test_images, test_labels = tensors(2048, np.random.default_rng(1))
    for epoch in range(EPOCHS):
        images, labels = tensors(PER_EPOCH, rng)
        net.train()
        for start in range(0, PER_EPOCH, BATCH):
            loss = nn.functional.cross_entropy(net(images[start : start + BATCH]), labels[start : start + BATCH])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        net.eval()
        with torch.no_grad():
            accuracy = (net(test_images).argmax(1) == test_labels).float().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {accuracy:.1%} of 2048 other pictures", file=sys.stderr)
    np.savez_compressed("weights.npz", allow_pickle=False, **weights_of(net))


if __name__ == "__main__":
    main()
