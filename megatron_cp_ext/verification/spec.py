"""The configuration of one run, written `algorithm:key=value,flag,...`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_cp_ext.errors import UsageError

ALGORITHM_FLAGS = {
    "ring": "megatron_cp_algo",
    "ulysses": "ulysses_cp_algo",
    "hybrid": "hybrid_cp_algo",
    "kvallgather": "kvallgather_cp_algo",
}
NO_CP = "none"
DEGREES = ("cp", "tp", "pp", "dp", "ulysses")

# Megatron's name of what a spec or an option of `verify` decides, and how to ask for it there.
DECIDED_ELSEWHERE = {
    "context-parallel-size": "write cp=N in the SPEC",
    "tensor-model-parallel-size": "write tp=N in the SPEC",
    "pipeline-model-parallel-size": "write pp=N in the SPEC",
    "sequence-parallel": "write sp in the SPEC",
    "context-parallel-algo": "begin the SPEC with the algorithm, as in ring:cp=2",
    "ulysses-degree-in-cp": "write ulysses=N in the SPEC",
    "seq-length": "use verify's --seq-length",
    "train-iters": "use verify's --steps",
    "bf16": "use verify's --dtype bf16",
    "fp16": "use verify's --dtype; fp32 and bf16 are compared",
    "data-path": "use verify's --data-prefix",
    "mock-data": "leave --data-prefix out",
    "cp-metrics-file": "read the metrics from verify.json",
}


@dataclass(frozen=True)
class RunSpec:
    """One configuration: an algorithm, degrees of parallelism, and options of this run alone.

    Args:
        algorithm: `ring`, `ulysses`, `hybrid`, `kvallgather`, or `none` for Megatron's own
            attention without context parallelism.
        cp: context-parallel size.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        dp: data-parallel size.
        ulysses: Ulysses degree inside the context-parallel group; hybrid only.
        sequence_parallel: Megatron's sequence parallelism, which needs `tp` above 1.
        options: Megatron's own arguments for this run alone, as on its command line.
    """

    algorithm: str
    cp: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ulysses: int | None = None
    sequence_parallel: bool = False
    options: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, *, option: str = "--config") -> RunSpec:
        """Read `algorithm:key=value,flag,...`.

        `cp`, `tp`, `pp`, `dp`, `ulysses` and the flag `sp` are the spec's own. Every other
        `key=value` becomes Megatron's `--key value`, every other `flag` its `--flag`;
        underscores turn into dashes, and spaces inside a value separate several values.

        Raises:
            UsageError: the text is not such a spec, or contradicts itself.
        """

        def mistake(reason: str, remedy: str) -> UsageError:
            return UsageError(option=option, value=text, reason=reason, remedy=remedy)

        name, _, rest = text.strip().partition(":")
        algorithm = _algorithm(name)
        if algorithm is None:
            raise mistake(
                f"unknown algorithm {name!r}",
                f"one of {', '.join([*ALGORITHM_FLAGS, NO_CP])}, as in ring:cp=2",
            )
        degrees: dict[str, int] = {}
        sequence_parallel = False
        options: list[str] = []
        seen: set[str] = set()
        for item in filter(None, (part.strip() for part in rest.split(","))):
            key, equals, value = (part.strip() for part in item.partition("="))
            key = key.lstrip("-").replace("_", "-")
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", key) or (equals and not value):
                raise mistake(f"{item!r} is neither key=value nor a flag", "as in ring:cp=2,tp=2")
            if key in seen:
                raise mistake(f"{key} is given twice", "give it once")
            seen.add(key)
            if key in DEGREES:
                if not value.isdecimal() or int(value) < 1:
                    raise mistake(f"{key} must be a whole number above 0", f"as in {key}=2")
                degrees[key] = int(value)
            elif key == "sp":
                if equals:
                    raise mistake("sp takes no value", "write sp alone, as in ring:cp=2,tp=2,sp")
                sequence_parallel = True
            elif key in DECIDED_ELSEWHERE:
                raise mistake(f"{key} is not a spec's own key", DECIDED_ELSEWHERE[key])
            else:
                options += [f"--{key}", *value.split()]
        spec = cls(
            algorithm,
            **degrees,
            sequence_parallel=sequence_parallel,
            options=tuple(options),
        )
        spec._check(mistake, "cp" in degrees)
        return spec

    def _check(self, mistake: Callable[[str, str], UsageError], cp_given: bool) -> None:
        """Raise the mistake that makes this spec contradict itself, if there is one."""
        if self.algorithm == NO_CP:
            if self.cp != 1:
                raise mistake(
                    f"cp={self.cp} without an algorithm", f"one of {', '.join(ALGORITHM_FLAGS)}"
                )
        elif not cp_given:
            raise mistake("the context-parallel size is missing", f"{self.algorithm}:cp=2")
        if self.algorithm == "hybrid":
            if self.ulysses is None:
                raise mistake("hybrid needs its Ulysses degree", "as in hybrid:cp=4,ulysses=2")
            if self.cp % self.ulysses:
                raise mistake(
                    f"the Ulysses degree {self.ulysses} does not divide cp={self.cp}",
                    f"one of {', '.join(str(n) for n in _divisors(self.cp))}",
                )
        elif self.ulysses is not None:
            raise mistake(
                f"{self.algorithm} has no Ulysses degree to choose", "hybrid:cp=4,ulysses=2"
            )
        if self.sequence_parallel and self.tp == 1:
            raise mistake("sequence parallelism needs tensor parallelism", "add tp=2")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.cp * self.tp * self.pp * self.dp

    def __str__(self) -> str:
        """The spec in its shortest form; `parse` reads it back."""
        items = [] if self.algorithm == NO_CP else [f"cp={self.cp}"]
        if self.ulysses is not None:
            items.append(f"ulysses={self.ulysses}")
        items += [f"{key}={n}" for key in ("tp", "pp", "dp") if (n := getattr(self, key)) != 1]
        if self.sequence_parallel:
            items.append("sp")
        items += [
            name + ("=" + " ".join(values) if values else "")
            for name, values in _grouped(self.options)
        ]
        return self.algorithm + (":" + ",".join(items) if items else "")

    def arguments(self) -> list[str]:
        """Megatron's command line arguments of this configuration."""
        arguments = [
            *("--context-parallel-size", str(self.cp)),
            *("--tensor-model-parallel-size", str(self.tp)),
            *("--pipeline-model-parallel-size", str(self.pp)),
        ]
        if self.algorithm != NO_CP:
            arguments += ["--context-parallel-algo", ALGORITHM_FLAGS[self.algorithm]]
        if self.ulysses is not None:
            arguments += ["--ulysses-degree-in-cp", str(self.ulysses)]
        if self.sequence_parallel:
            arguments.append("--sequence-parallel")
        return [*arguments, *self.options]

    def baseline(self) -> RunSpec:
        """What this run is compared with: no CP, DP or SP, at the same TP and PP.

        TP and PP stay because Megatron draws a rank's initial weights from a seed that depends
        on them: with other sizes it is another model.
        """
        return RunSpec(NO_CP, tp=self.tp, pp=self.pp)


def refuse_decided(arguments: Iterable[str]) -> None:
    """Raise UsageError for a Megatron argument that `verify` sets itself.

    Args:
        arguments: what follows `--` on the command line.
    """
    for argument in arguments:
        name = argument.removeprefix("--").partition("=")[0].replace("_", "-")
        if argument.startswith("--") and name in DECIDED_ELSEWHERE:
            raise UsageError(
                option="--",
                value=argument,
                reason="verify sets this itself, for each run",
                remedy=DECIDED_ELSEWHERE[name],
            )


def _algorithm(name: str) -> str | None:
    """The short name of an algorithm given by its short or its long name."""
    if name in ALGORITHM_FLAGS or name == NO_CP:
        return name
    return {long: short for short, long in ALGORITHM_FLAGS.items()}.get(name)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _grouped(options: Iterable[str]) -> list[tuple[str, list[str]]]:
    """`--name value value --flag` as [(name, [value, value]), (flag, [])]."""
    groups: list[tuple[str, list[str]]] = []
    for option in options:
        if option.startswith("--"):
            groups.append((option.removeprefix("--"), []))
        else:
            groups[-1][1].append(option)
    return groups
