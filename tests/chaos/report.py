"""The report of a chaos run, as a table for people and as JSON for programs."""

import itertools
import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.chaos.memory import Sample, growth

GARBAGE_TYPES_MAX = 8


@dataclass
class Injected:
    """A fault of a run. Times are seconds since the start of the load."""

    kind: str
    started: float
    ended: float = 0.0
    recovery_seconds: float | None = None  # from its end to the first successful probe
    longest_gap: float = 0.0  # without a successful probe, from its start to its recovery
    is_noticed: bool = False  # whether any probe failed
    problem: str = ""  # why it could not be injected, or that no recovery was seen

    def line(self) -> str:
        noticed = "noticed" if self.is_noticed else "not noticed"
        recovery = "none" if self.recovery_seconds is None else f"{self.recovery_seconds:.1f} s"
        return (
            f"{self.started:7.1f} to {self.ended:6.1f} s  {self.kind:18} {noticed:12}"
            f" recovery {recovery}, gap {self.longest_gap:.1f} s"
        )


@dataclass
class Moment:
    """The memory of all control plane processes at one time."""

    name: str
    at: float
    samples: dict[str, Sample]


@dataclass
class Report:
    seed: int
    minutes: float
    mutation: str = ""
    faults: list[Injected] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    probe_seconds: list[float] = field(default_factory=list)  # median, 95th percentile
    violations: dict[str, list[str]] = field(default_factory=dict)
    memory: list[Moment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # errors of the driver itself

    @property
    def violation_count(self) -> int:
        return sum(map(len, self.violations.values()))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1, default=str) + "\n")

    def text(self) -> str:
        facts = ", ".join(f"{name} {count}" for name, count in self.facts.items())
        answers = ", ".join(f"{name} {count}" for name, count in sorted(self.answers.items()))
        lines = [
            f"seed {self.seed}, {self.minutes:g} minutes, {len(self.faults)} faults"
            + (f", without the guard {self.mutation}" if self.mutation else ""),
            f"work: {facts}",
            f"answers: {answers}",
            "",
            *self._faults(),
            "",
            *self._memory(),
            "",
        ]
        for name, violations in self.violations.items():
            lines.append(f"{len(violations):6}  {name}")
            lines += [f"        {text[:600]}" for text in violations[:5]]
        lines += [f"problem: {text}" for text in self.problems]
        return "\n".join([*lines, f"{self.violation_count} violations"])

    def _faults(self) -> list[str]:
        counts = Counter(fault.kind for fault in self.faults)
        lines = [
            "Recovery: seconds from the end of a fault to the first successful probe (median, longest).",
            "Gap: the longest time without a successful probe, the fault itself included.",
        ]
        if self.probe_seconds:
            middle, most = self.probe_seconds
            lines.append(f"A successful probe takes {middle:.1f} s (95%: {most:.1f} s).")
        lines.append(f"{'fault':24} times  noticed   recovery       gap")
        for kind, count in sorted(counts.items()):
            faults = [fault for fault in self.faults if fault.kind == kind]
            times = [f.recovery_seconds for f in faults if f.recovery_seconds is not None]
            seconds = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "–"
            gap = max(fault.longest_gap for fault in faults)
            noticed = sum(fault.is_noticed for fault in faults)
            problem = next((f"   {fault.problem}" for fault in faults if fault.problem), "")
            lines.append(f"{kind:24} {count:5}  {noticed:7}   {seconds:12} {gap:5.1f}{problem}")
        return lines

    def _memory(self) -> list[str]:
        lines = []
        names = sorted({name for moment in self.memory for name in moment.samples})
        for name in names:
            lines.append(f"memory of {name}: {self._sizes(name)}")
            seen = [moment for moment in self.memory if name in moment.samples]
            for before, after in itertools.pairwise(seen):
                old, new = before.samples[name], after.samples[name]
                if old.pid == new.pid:
                    lines.append(f"  what grew from {before.name} to {after.name}:")
                    lines += [f"    {text}" for text in growth(old, new)]
                    lines.append(f"    heap: {old.heap} → {new.heap}")
                    lines.append(f"    garbage in cycles: {_summary(old)} → {_summary(new)}")
        return lines

    def _sizes(self, name: str) -> str:
        parts, pid = [], 0
        for moment in self.memory:
            if sample := moment.samples.get(name):
                restarted = " (another process)" if pid not in (0, sample.pid) else ""
                parts.append(f"{moment.name} {sample.rss / 2**20:.0f} MiB{restarted}")
                pid = sample.pid
        return ", ".join(parts)


def _summary(sample: Sample) -> str:
    """Returns the number of objects of garbage, and the most frequent types."""
    counts = Counter(sample.garbage)
    most = ", ".join(f"{name} {count}" for name, count in counts.most_common(GARBAGE_TYPES_MAX))
    return f"{counts.total()} objects ({most})"
