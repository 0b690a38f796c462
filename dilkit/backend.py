"""The interface of a backend: its limits as data, the reasons for a refusal, `forward` and `backward`."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from dilkit.bias.form import BY_QUERY
from dilkit.checks import boolean, integer
from dilkit.device import Capability, Device, check_capability
from dilkit.pattern import OFFSETS, OVERLAPS, DilatedSegment
from dilkit.pattern.lowering import Given, Segments, Unlowered
from dilkit.problem import DTYPES, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.inputs import Inputs

COUNT = "count"
"""In place of the name of a form: a backend goes by `Pattern.count`, whatever the branches are."""


@dataclass(frozen=True)
class Refusal:
    """One reason why a backend cannot compute a problem.

    `code` names what was asked for, `value` is its value, `limit` is what the backend supports, and `hint` is a way out
    (it may be empty). `str(refusal)` is the line that error texts and `dilkit info` show.

    Example:

        >>> from dilkit import Refusal
        >>> str(Refusal("head_dim", "512", "at most 256", "split the heads"))
        'head_dim 512: at most 256 (split the heads)'
    """

    code: str
    value: str
    limit: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.code} {self.value}: {self.limit}{hint}"


@dataclass(frozen=True)
class Limits:
    """Limits of a backend, as data.

    The defaults describe a backend for CPUs that supports everything. None in place of a set or a number means no limit.

    Example:

        >>> from dilkit import Limits, Pattern, Problem
        >>> limits = Limits(max_head_dim=128, gradients=False)
        >>> problem = Problem(pattern=Pattern([512], [1]), seq=1024, heads=8, head_dim=256, requires_grad=True)
        >>> for refusal in limits.refusals(problem):
        ...     print(refusal)
        head_dim 256: at most 128
        requires_grad yes: not supported
    """

    devices: frozenset[str] | None = frozenset({"cpu"})
    """torch's device types, such as "cpu" and "cuda", which means NVIDIA's GPUs; "hip" for AMD's."""
    dtypes: frozenset[str] = frozenset(DTYPES)
    """Names of dtypes, such as "bfloat16"."""
    min_capability: Capability | None = None
    """The lowest CUDA compute capability, such as (8, 0)."""
    max_capability: Capability | None = None
    """The highest CUDA compute capability."""
    device_features: frozenset[str] = frozenset()
    """The features that a device must have (`Device.features`)."""
    max_head_dim: int | None = None
    """The largest `head_dim`."""
    head_dim_multiple: int = 1
    """`head_dim` must be a multiple of this."""
    causal: bool = True
    """True if `is_causal=True` is supported."""
    key_padding_mask: bool = True
    """True if a `key_padding_mask` is supported."""
    gradients: bool = True
    """True if there is a backward pass."""
    varlen: bool = False
    """True if sequences of different lengths may be packed one after the other (`Inputs.cu_seqlens`)."""
    kv_cache: bool = False
    """True if the last rows alone may be computed, against a cache of keys and values (`Inputs.cache_seqlens`)."""
    query_offset: bool = False
    """Allows other queries than keys (`Problem.queries`)."""
    stored: frozenset[str] = frozenset()
    """Dtypes of stored rows, of a backend with the decoding protocol (`dilkit.decoding.protocol`)."""
    dropout: bool = False
    """True if weights may be dropped: `forward`, `backward` and those of packed sequences then take a `dropout`, by this name."""
    softcap: bool = False
    """True if scores may be capped (`problem.softcap`)."""
    biases: frozenset[str] = frozenset()
    """The kinds of bias that may be added to the scores (`Inputs.bias`), of `dilkit.bias.form.BIASES`."""
    grouped_heads: bool = True
    """True if there may be fewer key/value heads than query heads."""
    head_ranges: bool = True
    """True if a branch may serve a range of heads only (`Pattern.heads`)."""
    forms: frozenset[str] | None = None
    """The forms that a pattern may be lowered to: some of `dilkit.pattern.lowering.FORMS`, or `COUNT` for a backend that goes by
    `Pattern.count`. None: dilated segments alone, `problem.pattern.segments`.
    """
    offsets: frozenset[str] = frozenset(OFFSETS)
    """The supported values of `Pattern.offset`."""
    overlaps: frozenset[str] = frozenset(OVERLAPS)
    """The supported values of `Pattern.overlap`."""

    def __post_init__(self) -> None:
        for name in ("devices", "dtypes", "device_features", "stored", "biases", "forms", "offsets", "overlaps"):
            names = getattr(self, name)
            if names is None and name in ("devices", "forms"):
                continue
            if not isinstance(names, (set, frozenset)) or not all(isinstance(one, str) for one in names):
                raise TypeError(f"{name}={names!r} is a {type(names).__name__}; a set of names is needed, as {{'cpu'}}")
            object.__setattr__(self, name, frozenset(names))
        for name in ("min_capability", "max_capability"):
            check_capability(name, getattr(self, name))
        for name in (field.name for field in fields(self) if isinstance(field.default, bool)):
            boolean(name, getattr(self, name))
        integer("head_dim_multiple", self.head_dim_multiple, at_least=1)
        if self.max_head_dim is not None:
            integer("max_head_dim", self.max_head_dim, at_least=0)

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        """Return a refusal for every limit that `problem` exceeds."""
        return (*self._device_refusals(problem), *self._size_refusals(problem), *self._feature_refusals(problem))

    def _device_refusals(self, problem: Problem) -> list[Refusal]:
        device, refusals = problem.device, []
        if self.devices is not None and device.platform not in self.devices:
            return [Refusal("device", device.platform, f"runs on {_listed(self.devices)}")]
        if device.torch_code is False:
            refusals.append(Refusal("torch", str(device), "the installed torch has no code for this GPU", torch_hint(device)))
        if device.capability is not None:
            low, high = self.min_capability, self.max_capability
            shown = f"{device.capability[0]}.{device.capability[1]}"
            if low is not None and device.capability < low:
                refusals.append(Refusal("capability", shown, f"at least {low[0]}.{low[1]} is needed"))
            if high is not None and device.capability > high:
                refusals.append(Refusal("capability", shown, f"at most {high[0]}.{high[1]} is supported"))
        if missing := self.device_features - device.features:
            refusals.append(Refusal("device features", _listed(device.features) or "none", f"{_listed(missing)} needed"))
        return refusals

    def _size_refusals(self, problem: Problem) -> list[Refusal]:
        refusals = []
        if problem.dtype not in self.dtypes:
            refusals.append(Refusal("dtype", problem.dtype, f"computes {_listed(self.dtypes)}"))
        if self.max_head_dim is not None and problem.head_dim > self.max_head_dim:
            refusals.append(Refusal("head_dim", str(problem.head_dim), f"at most {self.max_head_dim}"))
        if problem.head_dim % self.head_dim_multiple:
            refusals.append(Refusal("head_dim", str(problem.head_dim), f"a multiple of {self.head_dim_multiple} is needed"))
        return refusals

    def _feature_refusals(self, problem: Problem) -> list[Refusal]:
        pattern, refusals = problem.pattern, list[Refusal]()
        features = {
            "is_causal": (problem.is_causal, self.causal),
            "key_padding_mask": (problem.key_padding_mask, self.key_padding_mask),
            "requires_grad": (problem.requires_grad, self.gradients),
            "varlen": (problem.varlen, self.varlen),
            "kv_cache": (problem.kv_cache, self.kv_cache),
            "grouped heads": (problem.kv_heads != problem.heads, self.grouped_heads),
            "head ranges": (pattern.heads is not None and not problem.stored, self.head_ranges),
        }
        for code, (wanted, can) in features.items():
            if wanted and not can:
                refusals.append(Refusal(code, "yes", "not supported"))
        if problem.queries is not None and not self.query_offset:
            value = f"{problem.queries:,} for {problem.seq:,} keys"
            refusals.append(Refusal("queries", value, "query i has to be key i", "another backend, such as reference"))
        if problem.dropout_p and not self.dropout:
            dropout_p = f"{problem.dropout_p:g}"
            refusals.append(Refusal("dropout_p", dropout_p, "drops no weights", "dropout_p=0, or another backend"))
        if problem.softcap and not self.softcap:
            refusals.append(Refusal("softcap", f"{problem.softcap:g}", "caps no scores", 'backend="reference"'))
        for name in () if problem.bias is None else problem.bias.names:
            if name not in self.biases:
                limit = f"adds {_listed(self.biases)}" if self.biases else "adds nothing to the scores"
                refusals.append(Refusal("bias", name, limit, 'backend="reference"'))
        alike = problem.queries is None and not problem.kv_cache and not problem.stored
        if problem.bias is not None and problem.bias.by_query and not alike:
            refusals.append(Refusal("bias", BY_QUERY, "as many queries as keys are needed, and no cache"))
        if problem.stored:  # the tables of the step say what is seen
            limit = f"attends to stored rows of {_listed(self.stored)}" if self.stored else "attends to no stored rows"
            return refusals if problem.stored in self.stored else [*refusals, Refusal("stored rows", problem.stored, limit)]
        chosen = {"offset": (pattern.offset, self.offsets), "overlap": (pattern.overlap, self.overlaps)}
        for code, (value, known) in chosen.items():
            if value not in known:
                refusals.append(Refusal(code, repr(value), f"supports {_listed(known)}"))
        return [*refusals, *self._branch_refusals(problem)]

    def _branch_refusals(self, problem: Problem) -> list[Refusal]:
        branches = problem.pattern.branches
        if self.forms is None:
            unknown = {branch.kind for branch in branches} - {DilatedSegment.kind}
            return [Refusal("branch kind", _listed(unknown), f"supports {DilatedSegment.kind}")] if unknown else []
        beyond = [form for form in problem.forms if form.name not in self.forms]
        if COUNT in self.forms:
            beyond = [form for form in beyond if isinstance(form, Given)]
        if not beyond:
            return []
        refused = _listed({branches[form.branch].kind for form in beyond})
        if unlowered := next((form for form in beyond if isinstance(form, Unlowered)), None):
            return [Refusal("branch kind", refused, unlowered.why)]
        names = {form.name for form in beyond}
        hint = 'backend="native" on a CPU, "flex" on a GPU' if any(isinstance(form, Given) for form in beyond) else ""
        return [Refusal("branch kind", refused, f"shown as {_listed(names)}; computes {_listed(self.forms)}", hint)]


def offset_refusals(problem: Problem) -> list[Refusal]:
    """Refuse segments whose offsets differ among the query heads of one key/value head."""
    group, forms = problem.heads // problem.kv_heads, problem.forms
    unlike = [form for form in forms if isinstance(form, Segments) and not form.shares_offsets(group)]
    if not unlike:
        return []
    kinds = _listed({problem.pattern.branches[form.branch].kind for form in unlike})
    limit = "one offset for all query heads of a key/value head is needed"
    return [Refusal("branch kind", kinds, limit, "as many key/value heads as query heads, or another backend")]


class Backend(ABC):
    """One implementation of dilated attention. Subclass it to add your own.

        out[i] = softmax_j(scale * q_i . k_j + log count[h, i, j]) . v        lse[i] = logsumexp of the same row

    A subclass sets `name` and `limits`, implements `forward` and, unless `limits.gradients` is False, `backward`. A package
    makes its backend known by an entry point in the group `dilkit.backends`, a program by `register_backend`.
    docs/adding-a-backend.md goes through all of it.

    Example, the definition in plain torch, which needs memory for `heads * seq ** 2` scores:

        >>> import torch
        >>> from dilkit import Backend, Limits, Pattern, dilated_attention, register_backend, unregister_backend
        >>> class Plain(Backend):
        ...     name = "plain"
        ...     limits = Limits(key_padding_mask=False, gradients=False, grouped_heads=False)
        ...     def forward(self, inputs, problem):
        ...         count = problem.pattern.count(problem.seq, problem.heads, is_causal=problem.is_causal)
        ...         scores = problem.scale * torch.einsum("bihd,bjhd->bhij", inputs.query, inputs.key) + count.log()
        ...         return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), inputs.value), scores.logsumexp(-1)
        >>> register_backend(Plain())
        >>> q, k, v = torch.randn(3, 1, 16, 2, 8).unbind()
        >>> pattern = Pattern([8, 16], [1, 2])
        >>> out = dilated_attention(q, k, v, pattern, backend="plain")
        >>> torch.allclose(out, dilated_attention(q, k, v, pattern, backend="reference"), atol=1e-5)
        True
        >>> unregister_backend("plain")
    """

    name: str
    """The name that `backend=` and `DILKIT_BACKEND` use."""
    summary: ClassVar[str] = ""
    """One line for `dilkit info` and the documentation."""
    requires: ClassVar[tuple[str, ...]] = ()
    """The modules that the backend imports when it computes. They are looked up without being imported."""
    extra: ClassVar[str] = ""
    """The extra of dilkit that installs what is required."""
    limits: ClassVar[Limits] = Limits()
    """The problems that the backend can compute."""
    priority: ClassVar[int] = 0
    """The automatic choice takes the backend with the highest priority that can compute the problem. dilkit's own backends
    have priorities from 0 to 20, which a table redistributes among them by what suits the device.
    """
    reproducible: ClassVar[bool] = False
    """True if equal inputs give equal bits in every run, with any number of threads. `dilkit verify --repeats` repeats runs."""

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        """Return every reason why this backend cannot compute `problem`; empty if it can."""
        return (*missing_modules(self.requires, self.extra), *self.limits.refusals(problem))

    def detail(self, problem: Problem) -> str:
        """Describe the kernel that would run for a problem that is not refused, and why; empty if there is only one."""
        return ""

    def proof_facts(self, problem: Problem) -> tuple[str, ...]:
        """Return the facts that a proof of its kernels for `problem` depends on; empty: they are trusted everywhere.

        They are the device, its driver, the kernels' sources, their compiler, and the call.
        """
        return ()

    def encode(self, problem: Problem) -> Any:
        """Return what is the same for all calls of `problem`: `forward` and `backward` get it as `problem.encoded`.

        The pattern cache keeps it with the call, by its `nbytes`. Called directly, they find None there.
        """
        return None

    @abstractmethod
    def forward(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        """Return `out`, contiguous and like the query, and `lse` `(batch, heads, rows)`, fp32 (fp64 for fp64).

        A row that sees no key has `out = 0`, `lse = -inf`. Packed sequences come with `inputs.cu_seqlens` if `limits.varlen`, the
        last rows against a cache with `inputs.cache_seqlens` if `limits.kv_cache`, and `inputs.dropout` if `limits.dropout`.
        """

    def backward(self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem) -> tuple[Tensor, ...]:
        """Return `(dquery, dkey, dvalue)`, given the `out` and `lse` of the whole softmax: `P = exp(s - lse)`.

        `dout` has a contiguous last dimension. Rows with `lse = -inf` have zero gradient. There is none against a cache. With
        `problem.bias.learned` a fourth is the gradient of `inputs.bias.weights`, summed over the batch.
        """
        raise NotImplementedError(f"backend {self.name!r} states gradients in its limits but has no backward")


def missing_modules(modules: tuple[str, ...], extra: str = "") -> tuple[Refusal, ...]:
    """Return a refusal for each missing module, without importing any; `extra`: the extra of dilkit that installs them."""
    hint = f"pip install 'dilkit[{extra}]'" if extra else ""
    return tuple(
        Refusal("module", name, "not installed", hint or f"pip install {name}") for name in modules if not _installed(name)
    )


@lru_cache(maxsize=256)
def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def torch_hint(device: Device) -> str:
    """Return advice on the torch build to install if the installed one has no code for this GPU."""
    capability = device.capability
    if device.platform == "hip":
        return "install a torch built for ROCm"
    if capability is not None and capability < (7, 5):
        return "install a torch built for CUDA 12.6, the last line with code for Maxwell, Pascal and Volta"
    return "install a torch built for CUDA 12.8 or newer"


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names))
