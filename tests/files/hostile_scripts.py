# ruff: noqa: E501 - a line for each file
"""TorchScript files whose code would write files, never end, or take all memory; benchmarks read them, too."""

from __future__ import annotations

import io
import warnings
import zipfile

import torch
from torch import nn

__all__ = [
    "DEFINITIONS",
    "ENDLESS",
    "LARGE",
    "OTHER_ARCHIVES",
    "OTHER_PICKLES",
    "PICKLES",
    "REACHES_OUT",
    "hostile_archive",
    "hostile_script",
]

_CODE = "code/__torch__/torch/nn/modules/linear.py"
_CLASS = """class Linear(Module):
  __parameters__ = ["weight", "bias", ]
  __buffers__ = []
  weight : Tensor
  bias : Tensor
  def forward(self: __torch__.torch.nn.modules.linear.Linear,
    input: Tensor) -> Tensor:
"""

# Statements that reach files, processes or Python itself, if torch or Python runs them; VICTIM is the name of a file.
REACHES_OUT = {
    "save": 'torch.save(input, "VICTIM")',
    "a comment inside": '_0 = (torch # "\n    .save(input, "VICTIM"))',
    "a line that goes on": 'torch\\\n    .save(input, "VICTIM")',
    "a comment in a list": '_0 = [torch, # )]\n    torch.save(input, "VICTIM")]',
    "spaces": 'torch  .  save(input, "VICTIM")',
    "brackets": '(torch).save(input, "VICTIM")',
    "getattr of torch": 'getattr(torch, "save")(input, "VICTIM")',
    "getattr of operators": 'getattr(ops.aten, "save")(input, "VICTIM")',
    "getattr of an escape": r'getattr(torch, "s\x61ve")(input, "VICTIM")',
    "getattr of self": 'getattr(self, "__class__")',
    "getattr of a variable": 'name = "save"\n    getattr(torch, name)(input, "VICTIM")',
    "an alias": 't = torch\n    t.save(input, "VICTIM")',
    "an alias of a function": 'f = torch.save\n    f(input, "VICTIM")',
    "aliases in a tuple": 'f, g = torch.save, torch.load\n    f(input, "VICTIM")',
    "an alias in a list": 'f = [torch.save]\n    (f[0])(input, "VICTIM")',
    "an alias in a dict": 'f = {"a": torch.save}\n    (f["a"])(input, "VICTIM")',
    "an alias in self": 'self.f = torch.save\n    (self).f(input, "VICTIM")',
    "an alias that is annotated": 'f = annotate(Tensor, torch.save)\n    f(input, "VICTIM")',
    "a function inside": 'def f():\n      return torch.save(input, "VICTIM")\n    _0 = fork(f)',
    "operators": 'ops.aten.save(input, "VICTIM")',
    "from_file": 'torch.from_file("VICTIM", True, 4)',
    "from_file by name": 'torch.from_file(filename="VICTIM", shared=True, size=4)',
    "from_file in operators": 'ops.aten.from_file("VICTIM", True, 4)',
    "full width letters": 'torch.ｓａｖｅ(input, "VICTIM")',
    "another namespace": 'ops.image.write_file("VICTIM", input)',
    "a library": 'torch.ops.load_library("VICTIM")',
    "classes": 'torch.classes.dist_c10d.FileStore("VICTIM", 1)',
    "classes of the file": '__torch__.torch.classes.dist_c10d.FileStore("VICTIM", 1)',
    "new classes": "__torch__.torch.classes.a.B.__new__(__torch__.torch.classes.a.B)",
    "remote": 'ops.prim.rpc_sync("a", "b")',
    "communication": 'ops.c10d.broadcast_(input, 0)',
    "aot": 'ops.aoti.load("VICTIM")',
    "open": 'open("VICTIM", "w")',
    "eval": "eval(\"open('VICTIM', 'w')\")",
    "exec": "exec(\"open('VICTIM', 'w')\")",
    "compile": "compile(\"open('VICTIM', 'w')\", \"a\", \"exec\")",
    "__import__": '__import__("os").remove("VICTIM")',
    "import": 'import os\n    os.remove("VICTIM")',
    "from": 'from os import remove\n    remove("VICTIM")',
    "__class__": "_0 = input.__class__.__mro__",
    "__class__ of a list": "_0 = [].__class__.__base__.__subclasses__()",
    "__class__ of a text": '_0 = ("").__class__',
    "__globals__": "_0 = (self).forward.__globals__",
    "__builtins__": '__builtins__.open("VICTIM", "w")',
    "a method of a tensor": 'input.tofile("VICTIM")',
    "numpy": 'input.numpy().tofile("VICTIM")',
    "storage": "input.untyped_storage()",
    "a method of a text": '_0 = "a".format_map({})',
    "a field of a format": '_0 = "{0.__class__}".format(input)',
    "an f-string": "_0 = f\"{open('VICTIM', 'w')}\"",
    "a lambda": '_0 = (lambda: torch.save(input, "VICTIM"))()',
    "a comprehension": '_0 = [torch.save(input, "VICTIM") for i in range(1)]',
    "a star": 'torch.save(*(input, "VICTIM"))',
    "two stars": 'torch.add(**{"self": input})',
    "a condition": '_0 = 1 if torch.save(input, "VICTIM") else 2',
    "a walrus": '_0 = (f := torch.save)(input, "VICTIM")',
    "an operator of Python": '_0 = input @ input',
    "a deletion": "del input",
    "a try": 'try:\n      torch.save(input, "VICTIM")\n    except E:\n      pass',
    "a class inside": "class A:\n      x = torch.save(input, 'VICTIM')",
    "a decorator": '@torch.save\n    def f(x):\n      return x',
    "a default": 'def f(x=torch.save(input, "VICTIM")):\n      return x\n    f()',
    "a global": "global torch",
    "setting torch": "torch.save = 1",
    "setting an item": 'torch.a["b"] = 1',
    "a loop over texts": 'for i in open("VICTIM", "w"):\n      pass',
    "with": 'with open("VICTIM", "w"):\n      pass',
    "printing": 'ops.prim.Print(input)',
    "a print operator": 'torch._print("a")',
    "an import of graphs": 'torch.import_ir_module("VICTIM")',
    "pointers": "torch.set_(input, 4096, 1, [1], [1])",
    "fbgemm": "torch.fbgemm_pack_gemm_matrix_fp16(input)",
    "a pinned tensor": "torch.pin_memory(input)",
    "cuda": "ops.cuda._set_device(1)",
    "profiler": 'ops.profiler._record_function_enter("a")',
    "a module of the file": '__torch__.os.remove("VICTIM")',
    "a module above": '__torch__.__class__.__init__("VICTIM")',
    "constants": "CONSTANTS.__class__",
    "constants that are missing": "CONSTANTS.c7",
}  # fmt: skip

_TUPLES = "a = (1, 2)\n    b = (1, 2)\n    for i in range(100):\n      a = (a, a)\n      b = (b, b)\n"
_TEXTS = 'a = "ab"\n    b = "ab"\n    for i in range(18):\n      a = torch.add(a, a)\n      b = torch.add(b, b)\n'

# Statements that take all time or memory, if nothing limits them.
ENDLESS = {
    "a loop": "while True:\n      pass",
    "a loop of operators": "while True:\n      input = torch.add(input, 1)",
    "a long range": "for i in range(1000000000000000000):\n      pass",
    "loops within loops": "for i in range(100000):\n      for j in range(100000):\n        pass",
    "recursion": "return (self).forward(input, )",
    "a function that calls itself": "return MODULE.again(input, )",
    "texts that double": 'a = "ab"\n    while True:\n      a = torch.add(a, a)',
    "lists that double": "a = [1]\n    while True:\n      a = torch.add(a, a)",
    "a list added to itself": "a = [1]\n    while True:\n      a = torch.add_(a, a)",
    "a list extended by itself": "a = [1]\n    while True:\n      torch.extend(a, a)",
    "a list times a number": "a = torch.mul([1], 1000000000000)",
    "a text times a number": 'a = torch.mul("a", 1000000000000)',
    "powers": "a = torch.pow(9, torch.pow(9, 9))",
    "powers of powers": "a = 9\n    while True:\n      a = torch.mul(a, a)",
    "an operator of powers": "a = 9**9**9**9",
    "a shift": "a = torch.__lshift__(1, 1000000000000)",
    "a factorial": "a = torch.factorial(1000000000)",
    "a width": 'a = torch.percentFormat("%1000000000d", 1)\n    a = torch.remainder("%1000000000d", 5)',
    "a padded text": 'a = torch.ljust("a", 1000000000000)',
    "a zero filled text": 'a = torch.zfill("a", 1000000000000)',
    "replacing": 'a = "aaaaaaaaaa"\n    while True:\n      a = torch.replace(a, "a", "aaaaaaaaaa")',
    "joining": 'a = "ab"\n    while True:\n      a = torch.join(a, [a, a, a, a])',
    "a range as a list": "a = ops.prim.rangelist(1000000000000)",
    "lists of themselves": "a = [1]\n    for i in range(100):\n      a = [a, a]\n    b = torch.eq(a, a)",
    "printing lists of themselves": "a = [1]\n    for i in range(100):\n      a = [a, a]\n    b = str(a)",
    "returning lists of themselves": "a = [input]\n    for i in range(30):\n      a = [a, a]\n    return a",
    "a list in itself": "a = [1]\n    torch.append(a, a)\n    b = torch.eq(a, a)\n"
    "    c = str(a)\n    d = torch.tensor(a)",
    "a dict of tuples": "a = (1, 2)\n    for i in range(100):\n      a = (a, a)\n    b = {a: 1}",
    "tuples as keys": _TUPLES + "    c = torch.dict([(a, 1)])",
    "a tuple to remove": _TUPLES + "    c = torch.pop({1: 1}, a)",
    "tuples of an update": _TUPLES + "    c = {1: 1}\n    torch.update(c, [(a, 1)])",
    "identity of tuples": _TUPLES + "    c = torch.__is__(a, b)",
    "sizes of tuples": _TUPLES + "    c = torch._size_if_not_equal(a, b)",
    "dicts in dicts": "a = {1: 1}\n    b = {1: 1}\n    for i in range(60):\n"
    "      a = {1: a, 2: a}\n      b = {1: b, 2: b}\n    c = torch.eq(a, b)",
    "long texts counted": _TEXTS + "    c = torch.count(torch.mul([a], 1000000), b)",
    "long texts sorted": _TEXTS + "    c = torch.sorted(torch.mul([a, b], 100000))",
    "long texts printed": _TEXTS + "    c = [a, a, a, a, a, a, a, a, a, a]\n    d = [c, c, c, c, c, c, c, c, c, c]\n"
    "    e = [d, d, d, d, d, d, d, d, d, d]\n    for i in range(500):\n      f = str(e)",
    "long texts formatted": _TEXTS + f"    c = torch.percentFormat(\"{'%s' * 2000}\", ({'a, ' * 2000}))",
    "digits": "a = torch.round(5, -1000000000)",
    "zeros": "a = int(torch.zeros([1000000, 1000000]).tolist())",
    "a value of zeros": "a = int(torch.select(torch.zeros([1000000000000]), 0, 0))",
    "many zeros": "a = []\n    for i in range(1000):\n      torch.append(a, torch.zeros([67108864]))\n"
    "    b = int(torch.sum(torch.stack(a)))",
    "views of zeros": "a = []\n    for i in range(1000):\n"
    "      torch.append(a, torch.select(torch.zeros([67108864]), 0, 1))\n"
    "    b = int(torch.sum(torch.stack(a)))",
    "repeat": "a = int(torch.sum(torch.repeat(torch.ones([10]), [1000000000000])))",
    "arange": "a = int(torch.sum(torch.arange(1000000000000)))",
    "bincount": "a = torch.bincount(torch.tensor([1000000000000]))",
    "repeat_interleave": "a = torch.repeat_interleave(torch.tensor([1000000000000]))",
    "one_hot": "a = torch.one_hot(torch.tensor([1000000000000]))",
    "unbind": "a = torch.unbind(torch.zeros([1000000000]))",
    "split": "a = torch.split(torch.zeros([1000000000]), 1)",
    "split by name": "a = torch.split(torch.zeros([1000000000]), split_size=1)",
    "chunk": "a = torch.chunk(torch.zeros([1000000000]), 1000000000)",
    "tensor_split": "a = torch.tensor_split(torch.zeros([1000000000]), 1000000000)",
    "a product": "a = torch.ones([8000, 8000])\n"
    "    b = torch.mm(a, a)\n    for i in range(100):\n      b = torch.mm(a, b)\n"
    "    c = int(torch.sum(b))",
    "a pool": "a = torch.max_pool2d(torch.ones([1, 4000, 4000]), [2000, 2000], [1, 1], [0, 0], [1, 1])\n"
    "    c = int(torch.sum(a))",
    "a polynomial": "a = torch.special_chebyshev_polynomial_t(torch.tensor([0.5]), 1000000000000000)\n    c = int(a)",
    "differences": "a = torch.diff(torch.zeros([1000000000000]), 1000000000000)",
    "a power of matrices": ""
    "a = torch.matrix_power(torch.ones([500, 500]), 9000000000000000000)\n    c = int(torch.sum(a))",
    "many sizes": "for i in range(1000000):\n      a = torch.cumsum(torch.zeros([i, 3]), 0)",
    "a long sequence": "a = torch.gru(torch.zeros([100000000, 1, 2]), torch.zeros([1, 1, 2]), [torch.zeros([6, 2]), "
    "torch.zeros([6, 2])], False, 1, 0., False, False, False)",
    "deep brackets": "a = " + "(" * 5000 + "1" + ")" * 5000,
    "deep lists": "a = " + "[" * 90 + "1" + "]" * 90 + "\n    b = torch.tensor(a)",
    "a long chain": "a = self" + ".a" * 100_000,
    "calls of calls": "a = self" + "()" * 100_000,
    "signs": "a = " + "-" * 100_000 + "1",
    "words": "a = " + "not " * 100_000 + "True",
    "a long sum": "a = " + "1+" * 100_000 + "1",
    "a long number": "a = " + "9" * 100_000,
    "deep conditions": "".join(f"{'  ' * n}if True:\n    " for n in range(99)) + "  " * 99 + "pass",
    "elif": "if False:\n      pass\n" + "    elif False:\n      pass\n" * 20_000,
    "many names": "a = [" + "a," * 300_000 + "]",
    "an open text": 'a = "' + "a" * 1_000_000,
    "backslashes": "a = \"" + "\\" * 1_000_000,
    "nothing but bytes": "\xff" * 100_000,
    "a byte of zero": "a = 1\0",
    "a shift of a literal": "a = 1 << 10**9",
    "a negative shift": "a = torch.__lshift__(1, -5)",
    "a literal of 64 bits, negated": "a = torch.sub(-9223372036854775807, 9223372036854775807)",
    "a list times a literal": "a = [0] * 10**10",
    "a text times a literal": 'a = "a" * 10**10',
    "a generator": "a = torch.sum(i for i in range(1000000000))",
    "comprehensions within comprehensions": "a = [[[i for i in range(9)] for j in range(9)] for k in range(9)]",
    "slices of slices": "a = torch.mul([1], 1000000)\n    while True:\n      b = torch.slice(a, 1, 999999, 1)",
    "a slice without a step": "a = torch.slice([1, 2], -9223372036854775808, 9223372036854775807, 0)",
    "texts of a text": f'a = "{"ab " * 300_000}"\n    b = [[1]]\n    while True:\n'
    '      torch.append(b, torch.split(a, " "))',
    "numbers of ranges": "b = [[1]]\n    while True:\n      torch.append(b, ops.prim.rangelist(1000000))",
    "pairs of a dict": "a = {1: 1}\n    for i in range(20000):\n      torch._set_item(a, i, i)\n    b = [[(1, 1)]]\n"
    "    while True:\n      torch.append(b, torch.items(a))",
    "copies of a dict": "a = {1: 1}\n    for i in range(20000):\n      torch._set_item(a, i, i)\n    b = [a]\n"
    "    while True:\n      torch.append(b, torch.dict(a))",
    "a template of many braces": f'while True:\n      a = torch.format("{"{}" * 200_000}", 1)',
    "a pop from the front": "a = torch.mul([1], 1000000)\n    while True:\n      b = torch.pop(a, 0)\n"
    "      torch.append(a, 1)",
    "a condition on a size": "while torch.lt(torch.size(input, 0), 3):\n      input = torch.relu(input)",
    "a size that doubles": "while torch.gt(torch.size(input, 0), 1):\n      input = torch.cat([input, input])",
    "a condition on values": "while bool(torch.all(torch.ge(input, 0))):\n      input = torch.abs(input)",
    "a tensor of its outer products": "while True:\n      input = torch.kron(input, input)",
    "products of all pairs": "a = torch.cartesian_prod([torch.arange(3000), torch.arange(3000), torch.arange(3000)])\n"
    "    b = int(torch.sum(a))",
    "grids of many dimensions": f"a = torch.meshgrid([{'input[0], ' * 60}])",
    "enlarged by nothing": "a = torch.upsample_nearest2d(torch.ones([1, 1, 2, 2]), [-5, 9223372036854775807])",
    "a convolution without a stride": "a = torch.conv2d(torch.ones([1, 1, 8, 8]), torch.ones([1, 1, 2, 2]), None, [0, 0],"
    " [9223372036854775807, -1], [0, 0], 0)",
    "a spectrum of many": "a = torch.fft_fft(torch.ones([4]), 1000000000000)\n    b = bool(torch.isfinite(torch.sum(torch.abs(a))))",
    "steps of nothing": "a = torch.arange(0, 1, 0.0)",
    "tiny steps": "a = torch.arange(0., 1., 5e-324)",
    "rows that are not there": "a = torch.embedding(torch.ones([4, 4]), torch.tensor([4000000000000]))\n    b = int(torch.sum(a))",
    "an index that is not there": "a = torch.index_put_(torch.ones([4]), [torch.tensor([-4000000000])], torch.ones([1]))\n"
    "    b = int(torch.sum(a))",
    "strides beyond a storage": "a = torch.as_strided(torch.ones([4]), [1000000000, 2], [4000000000, 1])\n    b = int(torch.sum(a))",
    "strides below zero": "a = torch.as_strided(torch.ones([4]), [2, 2], [-4000000000, -1])\n    b = int(torch.sum(a))",
    "an offset beyond a storage": "a = torch.as_strided(torch.ones([4]), [2], [1], 4000000000)\n    b = int(torch.sum(a))",
}  # fmt: skip

# Statements that compute the values of large tensors, or take long as a whole: a second or less.
LARGE = {
    "a template of many": f'a = torch.percentFormat("{"%d" * 90_000}", ({"1, " * 90_000}))',
    "a sum over many operands": f'a = torch.einsum("{",".join(["ij"] * 3000)}", torch.mul([input], 3000))',
    "many tensors again and again": "a = torch.mul([input], 20000)\n    while True:\n      b = torch.cat(a)",
    "sorted values": "a = torch.sort(torch.neg(torch.arange(6000000)))\n    b = int(torch.select((a)[0], 0, 0))",
    "the order of values": "a = torch.argsort(torch.remainder(torch.mul(torch.arange(6000000), 7919), 1000003))\n"
    "    b = int(torch.select(a, 0, 0))",
    "distinct values": "a = torch._unique2(torch.remainder(torch.mul(torch.arange(6000000), 7919), 1000003))\n"
    "    b = int(torch.select((a)[0], 0, 0))",
    "the largest values": "a = torch.topk(torch.remainder(torch.mul(torch.arange(6000000), 7919), 1000003), 5000000)\n"
    "    b = int(torch.select((a)[0], 0, 0))",
    "a product of integers": "a = torch.ones([1200, 1200], dtype=4)\n    b = torch.mm(a, a)\n    c = int(torch.sum(b))",
    "a convolution of integers": "a = torch.ones([1, 16, 200, 200], dtype=4)\n    b = torch.ones([64, 16, 7, 7], dtype=4)\n"
    "    c = int(torch.sum(torch.conv2d(a, b)))",
    "a product of complex numbers": "a = torch.ones([1200, 1200], dtype=10)\n    b = torch.mm(a, a)\n"
    "    c = bool(torch.isfinite(torch.sum(b)))",
    "slow functions": "a = torch.ones([5000000])\n    b = torch.digamma(torch.lgamma(torch.erfinv(a)))\n"
    "    c = int(torch.sum(b))",
    "powers of many": "a = torch.ones([6000000], dtype=5)\n    b = torch.pow(a, a)\n    c = int(torch.sum(b))",
    "a wide search": "a = torch.searchsorted(torch.arange(1000000), torch.expand(torch.tensor([5]), [60000000]), out_int32=True)\n"
    "    c = int(torch.select(a, 0, 0))",
    "members of a wide set": "a = torch.isin(torch.expand(torch.tensor([5]), [60000000]), torch.arange(1000))\n"
    "    c = bool(torch.select(a, 0, 0))",
    "distinct values of a wide tensor": "a = torch._unique2(torch.expand(torch.tensor([5]), [60000000]))\n"
    "    b = int(torch.select((a)[0], 0, 0))",
    "common divisors": "a = torch.expand(torch.tensor([7540113804746346429]), [30000000])\n"
    "    b = torch.expand(torch.tensor([4660046610375530309]), [30000000])\n    c = int(torch.sum(torch.gcd(a, b)))",
    "a wide reduction": "a = torch.expand(torch.ones([1]), [60000000])\n    while True:\n      c = int(torch.sum(a))\n"
    "    c = int(torch.sum(a))",
    "a wider reduction": "a = torch.expand(torch.ones([1]), [1900000000])\n    c = int(torch.sum(a))",
    "a reduction along columns": "a = torch.expand(torch.ones([1, 1]), [900000000, 2])\n    c = int(torch.sum(torch.amax(a, [0])))",
    "sums of sums": "a = torch.ones([6000000])\n    b = torch.cumsum(torch.cumprod(a, 0), 0)\n    c = int(torch.select(b, 0, 0))",
    "sums along columns": "a = torch.ones([10000000, 2])\n    b = torch.cumsum(a, 0)\n    c = int(torch.select(torch.select(b, 0, 0), 0, 0))",
    "rows far apart": "a = torch.remainder(torch.mul(torch.arange(5000000), 7919), 1000003)\n"
    "    b = torch.index_select(a, 0, a)\n    c = int(torch.select(b, 0, 0))",
    "an index of many": "a = torch.remainder(torch.mul(torch.arange(5000000), 7919), 1000003)\n"
    "    b = torch.index_put(a, [a], a, True)\n    c = int(torch.select(b, 0, 0))",
    "a cubic enlargement": "a = torch.upsample_bicubic2d(torch.ones([1, 1, 8, 8]), [7000, 7000], False)\n"
    "    c = int(torch.sum(a))",
    "samples of a grid": "a = torch.grid_sampler(torch.ones([1, 1, 8, 8]), torch.zeros([1, 5000, 5000, 2]), 2, 0, False)\n"
    "    c = int(torch.sum(a))",
    "unfolded windows": "a = torch.im2col(torch.ones([1, 1, 300, 300]), [200, 200], [1, 1], [0, 0], [1, 1])\n"
    "    c = int(torch.sum(a))",
    "windows of a mean": "a = torch.avg_pool2d(torch.ones([1, 1, 4000, 4000]), [1500, 1500], [1, 1])\n    c = int(torch.sum(a))",
    "a search for many": "a = torch.searchsorted(torch.arange(5000000), torch.remainder("
    "torch.mul(torch.arange(5000000), 7919), 1000003))\n    c = int(torch.select(a, 0, 0))",
    "members of a set": "a = torch.isin(torch.arange(5000000), torch.arange(5000000))\n    c = bool(torch.select(a, 0, 0))",
    "a roll": "a = torch.ones([10000000, 2])\n    for i in range(100):\n      a = torch.roll(a, [1], [0])\n    c = int(torch.select(torch.select(a, 0, 0), 0, 0))",
    "a variance": "a = torch.var(torch.ones([6000000], dtype=5))\n    c = bool(torch.isfinite(a))",
    "a soft maximum": "a = torch.softmax(torch.ones([10000000, 2]), 0)\n    c = int(torch.select(torch.select(a, 0, 0), 0, 0))",
}  # fmt: skip

# Definitions of a module of the file, and the statements that use them.
DEFINITIONS = {
    "methods that call each other": (
        "a = (self).one(input, )",
        "  def one(self: X, x: Tensor) -> Tensor:\n    return (self).two(x, )\n"
        "  def two(self: X, x: Tensor) -> Tensor:\n    return (self).one(x, )\n",
    ),
    "functions that call each other twice": (
        "a = MODULE.f0(input, )",
        "".join(
            f"def f{n}(x: Tensor) -> Tensor:\n  y = MODULE.f{n + 1}(x, )\n  return MODULE.f{n + 1}(y, )\n"
            for n in range(50)
        ),
    ),
    "a default that calls itself": ("a = MODULE.f()", "def f(x: int=MODULE.f()) -> int:\n  return x\n"),
    "a length of itself": (
        "a = MODULE.A.__new__(MODULE.A)\n    b = torch.len(a)",
        "class A:\n  def __len__(self: MODULE.A) -> int:\n    return torch.len(self)\n",
    ),
    "a constant of itself": ("a = MODULE.A.x", "class A(Enum):\n  x = MODULE.A.x\n"),
    "a constant of two constants": (
        "a = MODULE.A.x0",
        "class A:\n" + "".join(f"  x{n} : List[int] = [MODULE.A.x{n + 1}, MODULE.A.x{n + 1}]\n" for n in range(60)),
    ),
    "a manager that never ends": (
        "with MODULE.A.__new__(MODULE.A):\n      pass",
        "class A:\n  def __enter__(self: X) -> int:\n    while True:\n      pass\n    return 1\n",
    ),
    "a class named as a type": (
        "a = MODULE.Tensor.__new__(MODULE.Tensor)\n    b = torch.add(a, 1)\n    (a).save(input, 'VICTIM')",
        "class Tensor:\n  def save(self: X, x: Tensor, y: str) -> int:\n    return torch.save(x, y)\n",
    ),
    "a class with the methods of Python": (
        "a = MODULE.A.__new__(MODULE.A)\n    b = (a).__class__()\n    c = (a).__reduce__()",
        "class A:\n  def __class__(self: X) -> int:\n    return open('VICTIM', 'w')\n"
        "  def __reduce__(self: X) -> int:\n    return (self).__dict__\n",
    ),
    "arguments named as modules": (
        "a = MODULE.f(input, input, input, )",
        "def f(torch: Tensor, ops: Tensor, CONSTANTS: Tensor) -> Tensor:\n  return torch.save(ops, 'VICTIM')\n",
    ),
    "a builtin that is a variable": (
        "isinstance = torch\n    getattr = ops\n    a = (isinstance).save(input, 'VICTIM')",
        "def f() -> int:\n  return 1\n",
    ),
    "many fields": (
        "a = MODULE.A()\n    b = torch.len(a)",
        "class A(NamedTuple):\n" + "".join(f"  x{n} : int\n" for n in range(20_000)),
    ),
    "digits": ("a = 1", "x = [" + ("1" * 399 + ",") * 2_000 + "]\n"),
    "blanks between signs": ("a = 1", "def f() -> int:\n  return " + "- (" * 90 + " " * 900_000 + "1" + ")" * 90),
    "comments, packed, and operators without end": (
        "while True:\n      input = torch.add(input, 1)",
        "# packed\n" + ("#" + "a" * 99 + "\n") * 100_000,
    ),
    "a million definitions": ("a = 1", "def f():\n  pass\n" * 300_000),
    "functions within functions": (
        "a = MODULE.f(1)",
        "def f(x: int) -> int:\n" + "".join(f"{'  ' * n}  def g{n}():\n" for n in range(90)) + "  " * 92 + "pass\n",
    ),
}

_PAIRS = b")q\x00" + b"h\x00h\x00\x86q\x00" * 60  # a tuple of two tuples of two tuples ...
_STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
_OFFSET = b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORAGE
_TENSOR = _OFFSET + b"K\x00"

# Pickles that take all time, if their values are hashed, printed or multiplied.
PICKLES = {
    "tuples as a key": _PAIRS + b"}h\x00Ns.",
    "tuples as the name of a storage": _PAIRS
    + b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nh\x00X\x03\x00\x00\x00cpuK\x04tQ.",
    "tuples as a kind of storage": _PAIRS + b"(h\x00ctorch\nFloatStorage\nh\x00X\x03\x00\x00\x00cpuK\x04tQ.",
    "tuples as a size": _PAIRS + _TENSOR + b"h\x00\x85K\x01\x85\x89NtR.",
    "many dimensions": _TENSOR
    + b"("
    + b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x3f" * 200_000
    + b"t("
    + b"K\x01" * 200_000
    + b"t\x89NtR.",
}

# Pickles with values of other kinds at the places where TorchScript has numbers, names and objects.
OTHER_PICKLES = {
    "an identity of a number": b"(K\x01tQ.",
    "an identity of nothing": b"NQ.",
    "an identity of a tensor": _TENSOR + b"K\x01\x85K\x01\x85\x89NtRQ.",
    "a kind of storage that is a text": b"(X\x07\x00\x00\x00storageX\x01\x00\x00\x000X\x01\x00\x00\x000tQ.",
    "a state of its own state": b"c__torch__\nNet\n)\x81q\x00h\x00bh\x00b.",
    "states without an object": b"}" + b"}b" * 1000 + b".",
    "a call of a call": b"ccollections\nOrderedDict\n)R" + b")R" * 1000 + b".",
    "a call of a tensor": _TENSOR + b"K\x01\x85K\x01\x85\x89NtR)R.",
    "a call of an attribute": b"c__torch__\n__reduce__\n(X\x02\x00\x00\x00lsX\x01\x00\x00\x00atR.",
    "a tag without a value": b"ctorch.jit._pickle\nrestore_type_tag\n)R.",
    "an offset beyond the storage": _OFFSET + b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x01\x85K\x01\x85\x89NtR.",
    "strides below zero": _TENSOR + b"K\x01\x85J\xff\xff\xff\xff\x85\x89NtR.",
    "strides beyond the storage": _TENSOR + b"K\x02K\x02\x86\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x01\x86\x89NtR.",
    "a size that is a fraction": _TENSOR + b"G?\xf0\x00\x00\x00\x00\x00\x00\x85K\x01\x85\x89NtR.",
    "a size of 2,000 bits": _TENSOR + b"\x8a\xfa" + b"\x7f" * 250 + b"\x85K\x01\x85\x89NtR.",
    "lists that are each other's items": b"]q\x00]q\x01h\x00ah\x00h\x01a.",
    "a list in itself, many times": b"]q\x00" + b"h\x00a" * 200_000 + b".",
}

OTHER_ARCHIVES = (
    "two roots",
    "two cases",
    "a folder above",
    "the code twice",
    "upper case code",
    "an absolute name",
    "a bomb",
    "a record listed twice",
    "a record elsewhere",
    "other packing",
    "two records in one place",
    "a longer record",
    "a directory in the directory",
    "an encrypted record",
    "a link",
    "a name of slashes",
    "a name that goes up",
    "a comment of zeros",
)


def _entries() -> dict[str, bytes]:
    target = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and says so
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), target)
    with zipfile.ZipFile(target) as file:
        entries = {each.filename.partition("/")[2]: file.read(each) for each in file.infolist()}
    # torch numbers classes that it compiles again; the name in data.pkl has a length before it
    code = next(name for name in entries if name.endswith(".py"))
    module = code.removeprefix("code/").removesuffix(".py").replace("/", ".")
    entries["data.pkl"] = entries["data.pkl"].replace(module.encode(), b"__torch__.torch.nn.modules.linear")
    return {name: content for name, content in entries.items() if not name.startswith("code/")} | {_CODE: entries[code]}


def _archive(entries: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", kind) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, content in entries.items():
            file.writestr(name.removesuffix("|"), content)
    return target.getvalue()


def hostile_script(body: str, victim: object = "victim", returned: str = "input", definitions: str = "") -> bytes:
    """Return a file with a linear layer whose forward begins with these statements, and more definitions."""
    code = f"{_CLASS}    {body}\n    return {returned}\n{definitions}def again(x: Tensor) -> Tensor:\n"
    code += "  return MODULE.again(x, )\n"
    entries = _entries()
    code = code.replace("VICTIM", str(victim)).replace("MODULE", "__torch__.torch.nn.modules.linear")
    entries[_CODE] = code.encode(errors="replace")
    kind = zipfile.ZIP_DEFLATED if "packed" in definitions or len(code) > 2**22 else zipfile.ZIP_STORED
    return _archive({f"net/{name}": content for name, content in entries.items()}, kind)


def _overlapping(data: bytearray) -> None:
    first, second = (data.find(b"PK\x01\x02", start) for start in (0, data.find(b"PK\x01\x02") + 4))
    data[second + 42 : second + 46] = data[first + 42 : first + 46]  # where the record begins


def _longer(data: bytearray) -> None:
    start = data.find(b"PK\x01\x02")
    data[start + 20 : start + 28] = b"\xff\xff\xff\x7f" * 2


def _encrypted(data: bytearray) -> None:
    for start in (data.find(b"PK\x01\x02") + 8, data.find(b"PK\x03\x04") + 6):
        data[start] |= 1


def _circular(data: bytearray) -> None:
    end = data.rfind(b"PK\x05\x06")
    data[end + 16 : end + 20] = end.to_bytes(4, "little")


def _commented(data: bytearray) -> None:
    data[-2:] = b"\xff\xff"
    data += bytes(65535)


_CHANGES = {
    "two records in one place": _overlapping,
    "a longer record": _longer,
    "a directory in the directory": _circular,
    "an encrypted record": _encrypted,
    "a comment of zeros": _commented,
}


def hostile_archive(kind: str, victim: object = "victim") -> bytes:
    """Return a file that torch and other readers could read differently."""
    good = {f"net/{name}": content for name, content in _entries().items()}
    code = f"net/{_CODE}"
    trap = (_CLASS + f'    torch.save(input, "{victim}")\n    return input\n').encode()
    if kind in _CHANGES:
        changed = bytearray(_archive(good))
        _CHANGES[kind](changed)
        return bytes(changed)
    if kind == "other packing":  # declares a window of 4 GB
        packed = _archive({**good, "net/x.py": bytes(10**6)}, zipfile.ZIP_LZMA)
        return packed.replace(b"\x5d\x00\x00\x80\x00", b"\x5d\xff\xff\xff\xff")
    if kind == "a bomb":
        return _archive({**good, code: trap + bytes(7 * 10**7)}, zipfile.ZIP_DEFLATED)
    others = {
        "two roots": {**good, **{f"other/{name[4:]}": trap if name == code else each for name, each in good.items()}},
        "two cases": {**good, code.replace("linear", "Linear"): trap},
        "a folder above": {**good, f"net/../{code}": trap},
        "the code twice": {**good, f"net/{code[4:]}/__init__.py": trap, f"net/code/{code[4:]}": trap},
        "upper case code": {**good, code.replace("code", "CODE"): trap},
        "an absolute name": {**good, f"/{code}": trap},
        "a record listed twice": {**good, f"{code}|": trap},
        "a link": {**good, "net/link": b"/etc/passwd"},
        "a name of slashes": {**good, "//": b"", "net//": b"", "net//data.pkl": trap, "\\net\\data.pkl": trap},
        "a name that goes up": {f"net/../../{name}": content for name, content in good.items()},
        "a record elsewhere": {**good, code.replace("/torch/nn", "/./torch/nn"): trap},
    }
    return _archive(others[kind])
