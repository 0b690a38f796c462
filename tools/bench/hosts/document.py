"""What the result of the suite `hosts` says."""

from __future__ import annotations

from collections.abc import Iterator

from dilkit.tools.bench.hosts.record import AUTO, HostsResult, Links
from dilkit.tools.bench.hosts.targets import GATHER, RING, ULYSSES, WIRE
from dilkit.tools.bench.ranks.document import fault_table
from dilkit.tools.bench.ranks.record import good
from dilkit.tools.console.text import in_bytes, in_seconds
from dilkit.tools.report.document import Axis, Document, Plot, Table, plots, tables
from dilkit.tools.report.entries import quartiles, times_as_long
from dilkit.tools.report.headline import suite_headline
from dilkit.tools.report.points import sampled, series_by_name
from dilkit.tools.report.targets import figure_table, suite_sentence

HEADER = (
    "who",
    "routes",
    "time",
    "quartiles",
    f"over {AUTO}",
    "a host sends",
    "interface / planned",
    "predicted",
    "simulated",
    "hidden",
)
SENTENCES = {
    RING: "over slow links a ring of all keys and values takes {} as long as dilkit",
    GATHER: "an all-gather of them {}",
    ULYSSES: "Ulysses {}",
    WIRE: "the interfaces send {} the planned bytes",
}
"""Figures by name, and the words that docs/measurements.md has for the worst value of each."""
METHOD = (
    "Hosts are network namespaces of one machine with an address each, joined by a bridge; both ends of every link are shaped "
    "with tc's token bucket, so that a host sends and receives at the rate that the table names. Links have no delay of their "
    "own. One rank of one thread on each host; all hosts share the cores of the machine, which also move the packets: what "
    "many bytes cost is work of the cores too, so that links of 10 Gbit/s are far from filled and figures of both links are "
    "close. A call is a forward and a backward pass. Before it is timed every way is compared with the definition in fp64 on "
    "a short sequence of as many branches; then all are timed in turns, and the slowest rank's time counts. The other schemes "
    "are written for this suite on dilkit's kernels and transports: the full ring sends keys and values round, and backward "
    "once more with their gradients in fp32, as ring-flash-attention does; the all-gather gives all to every rank, as context "
    "parallelism in torch does, and returns gradients in the rows' dtype, half the bytes of fp32; Ulysses deals out heads. "
    "They compute with dilkit's kernels what the pattern shows of what arrives. The schedule gather sends what torchscale's "
    "sequence parallelism would send of this pattern: an all-gather of kept keys and values. Bytes of interfaces are those "
    "that the kernel counts on each host, with headers, acknowledgements, and what ranks tell each other to agree. Predicted "
    "is the time of the planner's model over the measured one, by the speeds of kernel and links that were measured in the "
    "same job, before and after. Hidden is the share of the time that all exchanges of rows take by themselves which ranks do "
    "not spend waiting for a link in a call, the median of five: a wait counts from when all who send have begun, as before "
    "that it is one for their work."
)
_NAMES, _SECONDS = Axis("", "number"), Axis("time", "seconds")


def sentence(result: HostsResult) -> str:
    """For docs/measurements.md."""
    return suite_sentence(result, SENTENCES)


def document(result: HostsResult) -> Document:
    """All figures, times and bytes."""
    at = result.environment
    return Document(
        headline=suite_headline(result, f"{at.device_name}, {at.cores} cores for all hosts; mpirun: {result.mpi or 'not here'}"),
        tables=tables(figure_table(result.figures), *map(_table, good(result.links)), fault_table(result.faults)),
        plots=plots(*map(_times, good(result.links))),
        notes=tuple(_notes(result)),
        method=METHOD,
    )


def _table(links: Links) -> Table:
    return Table(f"{links.hosts} hosts, {links.title}", HEADER, tuple(_rows(links)), links.problem)


def _rows(links: Links) -> Iterator[tuple[str, ...]]:
    for name, entry in links.entries.items():
        if entry.time and entry.ranks:
            routes = ", ".join(dict.fromkeys(entry.ranks.routes))
            sent = in_bytes(max(entry.ranks.planned_bytes))
            time = in_seconds(entry.time.median_s), quartiles(entry.time), times_as_long(links, name, AUTO)
            predicted = f"{links.foretold(name):.2f}x" if name in links.predicted_s else "-"
            hidden = f"{100 * links.hidden[name]:.0f} %" if name in links.hidden else "-"
            simulated = f"{links.as_simulated(name):.2f}x" if name in links.simulated_s else "-"
            yield name, routes or "-", *time, sent, f"{links.bytes_ratio(name):.3f}", predicted, simulated, hidden


def _times(links: Links) -> Plot:
    bars = ((name, sampled(name, entry.seconds)) for name, entry in links.entries.items() if entry.time)
    return Plot(f"Forward and backward: {links.title}", "bars", series_by_name(bars), (_NAMES, _SECONDS))


def _notes(result: HostsResult) -> Iterator[str]:
    for links in good(result.links):
        for name, entry in links.entries.items():
            yield from (f"WRONG, {links.title}, {name}: {why}" for why in entry.reasons)
    for what, why in result.failures():
        yield f"FAILED, {what}: {why}"
