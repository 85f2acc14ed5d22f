"""Networks as users write them, for the tests of `from_module`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


# ------------------------------------------------------------------------------------ torchvision's ResNet18
class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    def __init__(self, num_classes: int = 1000, planes: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, planes, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before = planes
        for stage in range(1, 5):
            after = planes * 2 ** (stage - 1)
            blocks = BasicBlock(before, after, 1 if stage == 1 else 2), BasicBlock(after, after, 1)
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            before = after
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(before, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


# ------------------------------------------------------------------------------------------------- the others
class UNetClassifier(nn.Module):
    """An encoder, a decoder that joins its maps with the encoder's, and a classifier."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 12, 2, 2)
        self.join = nn.Sequential(nn.Conv2d(20, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU())
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        out = self.join(torch.cat([fine, self.up(coarse)], dim=1))
        out = F.relu(self.norm(torch.cat([out, fine], dim=1)))
        return self.head(out.mean((2, 3)))


class Conv1dNet(nn.Module):
    """Windows (B, T, F) of a sensor."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm1d(8)
        self.depthwise = nn.Conv1d(8, 16, 3, padding=1, groups=8)
        self.conv2 = nn.Conv1d(16, 12, 1)
        self.drop = nn.Dropout1d(0.1)
        self.fc = nn.Linear(12 * 6, 16)
        self.head = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x.permute(0, 2, 1))))
        x = F.max_pool1d(F.gelu(self.conv2(self.depthwise(x))), 2)
        x = F.dropout(self.drop(x).view(-1, 72), 0.2, training=self.training)
        return self.head(self.fc(x).relu())


class LSTMClassifier(nn.Module):
    """Tokens (B, T)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.fc = nn.Linear(10, outputs)

    def forward(self, x: Tensor) -> Tensor:
        _, (last, _) = self.lstm(self.embedding(x))
        return self.fc(torch.cat([last[-2], last[-1]], dim=1))


class SelfAttention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (each.view(b, t, self.heads, c // self.heads).transpose(1, 2) for each in (q, k, v))
        weights = torch.softmax(q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5, dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attn = SelfAttention(size, heads)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """Tokens (B, T) with T = 5."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 8)
        self.places = nn.Parameter(torch.zeros(1, 5, 8))
        self.block = Block(8, 2)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.tokens(x) + self.places)).mean(1))
