"""One model of each module of timm, the one with the fewest parameters, at the smallest image it takes."""

from __future__ import annotations

import torch

from tests.zoo.example import CannotBuild, Example

LIBRARY = "timm"


def names() -> list[str]:
    """One name for each module of timm: the model whose name promises the least."""
    import timm

    order = ("test_", "atto", "femto", "pico", "nano", "xxs", "xxtiny", "xx_small", "xs", "tiny", "mini", "_t", "small",
             "_s", "_b0", "_0", "18", "26")  # fmt: skip
    found = []
    for module in timm.list_modules():
        models = timm.list_models(module=module)
        if models:
            found.append(min(models, key=lambda name: (_rank(name, order), len(name), name)))
    return found


def _rank(name: str, order: tuple[str, ...]) -> int:
    return next((number for number, part in enumerate(order) if part in name), len(order))


def make(name: str) -> Example:
    """Build a model, at a small image if it takes one."""
    import timm

    last: Exception | None = None
    fixed = timm.get_pretrained_cfg(name)
    large = fixed.input_size[-1] if fixed is not None else 224
    for size in dict.fromkeys((64, 128, large)):
        for options in ({"img_size": size, "depth": 4}, {"img_size": size}, {"depth": 4}, {}):
            try:
                model = timm.create_model(name, pretrained=False, **options).eval()
                example = Example(model, (torch.randn(2, 3, size, size),))
                with torch.no_grad():
                    example()
                return example
            except Exception as error:
                last = error
    raise CannotBuild(f"{type(last).__name__}: {last}")
