"""Which method can split which attention over how many ranks: asked of the methods themselves, a line a variant.

A library's shapes are asked for as if it were installed, so that the answers are the same on every machine; what is
missing on this one is told apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, get_args

from sp_bench import kernels, methods
from sp_bench.attention.layouts import LayoutKind
from sp_bench.config.parsing import ConfigError, parse
from sp_bench.config.trial import AttentionShape, MethodConfig
from sp_bench.driver.overrides import conf_file

HEADS = {"MHA": (32, 32), "GQA": (32, 8), "MQA": (32, 1)}  # query heads, key/value heads
SP_SIZES = (1, 2, 3, 4, 8, 16, 64)


class Question(NamedTuple):
    method: MethodConfig
    kernel: str
    shape: AttentionShape
    sp_size: int

    def answer(self) -> str | None:
        """Why the method cannot, or None."""
        return methods.get(self.method.name).unsupported_reason(*self)


@dataclass(frozen=True)
class Support:
    """What one variant of a method can do, with any of its layouts and degrees, wherever its library is installed."""

    name: str
    variant: str | None
    works: tuple[Question, ...]
    refusal: str | None  # of the first heads and ranks for which nothing works, with a kernel that it takes

    @property
    def kernels(self) -> list[str]:
        """Those that it takes."""
        return [name for name in kernels.NAMES if any(q.kernel == name for q in self.works)]

    def sp_sizes(self, heads: tuple[int, int]) -> list[int]:
        """Over how many ranks it splits them."""
        split = {q.sp_size for q in self.works if (q.shape.num_heads, q.shape.num_kv_heads) == heads}
        return sorted(split)

    def layouts(self, *, causal: bool) -> list[str]:
        return [kind for kind in get_args(LayoutKind) if any(self._has(q, kind, causal) for q in self.works)]

    @staticmethod
    def _has(question: Question, kind: str, causal: bool) -> bool:
        return question.method.layout == kind and question.shape.causal == causal

    @property
    def on_cpu(self) -> bool:
        """A kernel that it takes runs there."""
        shape = replace(self.works[0].shape, dtype="float32")
        return any(kernels.get(name).unsupported_reason(shape, "cpu") is None for name in self.kernels)

    @property
    def missing_library(self) -> str | None:
        """Why this machine cannot run what the method supports, for want of a library, or None."""
        return self.works[0].answer()


def default_options(name: str) -> MethodConfig:
    """The options of a method as conf/method/<name>.yaml has them."""
    return parse(MethodConfig, conf_file(f"method/{name}"), "method")


def _options(name: str, variant: str | None, sp_size: int) -> Iterator[MethodConfig]:
    """Each layout, and each degree if its file has one, those of its file first."""
    default = replace(default_options(name), variant=variant)
    degrees = [default.ulysses_degree]
    if "ulysses_degree" in conf_file(f"method/{name}"):
        degrees += [None, *(n for n in range(1, sp_size + 1) if sp_size % n == 0)]
    for kind, degree in product(dict.fromkeys((default.layout, *get_args(LayoutKind))), dict.fromkeys(degrees)):
        method = replace(default, layout=kind, ulysses_degree=degree)
        try:
            methods.get(name).layout(method, sp_size)
        except ConfigError:
            continue
        yield method


def of_variant(name: str, variant: str | None) -> Support:
    asked = [
        Question(method, kernel, AttentionShape(1, 8192, *heads, 128, causal, "bfloat16"), sp_size)
        for sp_size in SP_SIZES
        for method in _options(name, variant, sp_size)
        for kernel, heads, causal in product(kernels.NAMES, HEADS.values(), (True, False))
    ]
    with methods.as_if_installed():
        answers = [(question, question.answer()) for question in asked]
    works = tuple(question for question, reason in answers if reason is None)
    taken, split = {q.kernel for q in works}, {(q.shape.num_kv_heads, q.sp_size) for q in works}
    refusals = (
        reason
        for question, reason in answers
        if reason and question.kernel in taken and (question.shape.num_kv_heads, question.sp_size) not in split
    )
    return Support(name, variant, works, next(refusals, None))


def all_methods() -> list[Support]:
    found = []
    for name in methods.NAMES:
        primitive = methods.get(name).PRIMITIVE
        found += [of_variant(name, variant) for variant in ([None] if isinstance(primitive, str) else primitive)]
    return found
