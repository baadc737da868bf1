"""What a chaos run found: a table for people, and JSON for programs."""

import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Injected:
    """A fault of a run. `recovery_seconds` is None if no probe noticed it."""

    kind: str
    at: float
    recovery_seconds: float | None = None
    problem: str = ""  # why it could not be injected


@dataclass
class Report:
    seed: int
    minutes: float
    mutation: str = ""
    faults: list[Injected] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    violations: dict[str, list[str]] = field(default_factory=dict)
    memory_start: dict[str, int] = field(default_factory=dict)
    memory_end: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # of the driver

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
        for name, found in self.violations.items():
            lines.append(f"{len(found):6}  {name}")
            lines += [f"        {text[:600]}" for text in found[:5]]
        lines += [f"problem: {text}" for text in self.problems]
        return "\n".join([*lines, f"{self.violation_count} violations"])

    def _faults(self) -> list[str]:
        counts = Counter(fault.kind for fault in self.faults)
        lines = [f"{'fault':24} times   noticed   recovery in seconds (median, longest)"]
        for kind, count in sorted(counts.items()):
            found = [fault for fault in self.faults if fault.kind == kind]
            times = [f.recovery_seconds for f in found if f.recovery_seconds is not None]
            seconds = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "–"
            problem = next((f"   {fault.problem}" for fault in found if fault.problem), "")
            lines.append(f"{kind:24} {count:5}   {len(times):7}   {seconds}{problem}")
        return lines

    def _memory(self) -> list[str]:
        return [
            f"memory of {name}: {self.memory_start.get(name, 0) >> 20} → {size >> 20} MiB"
            for name, size in self.memory_end.items()
        ]
