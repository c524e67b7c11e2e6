"""Every exception that m31 raises on purpose.

Each message answers four questions: what is wrong, where, what was expected, and what to do about it.
The answers stay available as fields, so that a program can act on them and a test can assert them.
`exit_code` is what the command line returns for that kind of error.
"""

from __future__ import annotations


class M31Error(Exception):
    """Base of all errors of m31.

    Args:
        what: the fault, one sentence without a final full stop.
        where: file, tensor, key, layer or argument at fault.
        expected: what would have been right.
        fix: what the user can do now.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: str | None = None, expected: str | None = None, fix: str | None = None
    ) -> None:
        self.what, self.where, self.expected, self.fix = what, where, expected, fix
        parts = [what if where is None else f"{where}: {what}"]
        if expected is not None:
            parts.append(f"expected {expected}")
        if fix is not None:
            parts.append(fix)
        super().__init__("; ".join(parts))


class ConfigError(M31Error):
    """config.json (or a file beside it) says something that m31 cannot or must not accept."""


class UnknownKey(ConfigError):
    """A key that this dialect does not have; `nearest` is the closest known one, or None."""

    def __init__(self, key: str, *, where: str, nearest: str | None) -> None:
        self.key, self.nearest = key, nearest
        hint = f"did you mean '{nearest}'?" if nearest else "remove it, or check the m31 version that knows it"
        super().__init__(f"unknown key '{key}'", where=where, fix=hint)


class UnsupportedFeature(ConfigError):
    """The file asks for a feature that no published checkpoint has and m31 therefore does not implement."""


class CheckpointError(M31Error):
    """A checkpoint folder cannot be used; nothing was computed with it."""


class NotACheckpoint(CheckpointError):
    """The path is not a checkpoint folder at all."""


class IndexMismatch(CheckpointError):
    """model.safetensors.index.json disagrees with the shards."""


class TruncatedShard(CheckpointError):
    """A shard is shorter (or longer) than its own header says."""


class BadHeader(CheckpointError):
    """A safetensors header cannot be parsed or contradicts itself."""


class MissingTensor(CheckpointError):
    """Tensors that the architecture needs are absent."""


class UnexpectedTensor(CheckpointError):
    """Tensors that the architecture does not have are present."""


class DuplicateTensor(CheckpointError):
    """One logical tensor is stored more than once."""


class WrongShape(CheckpointError):
    """A stored shape differs from the architecture's."""


class WrongDtype(CheckpointError):
    """A stored dtype is not one that this tensor may have."""


class NonFiniteWeight(CheckpointError):
    """A weight holds NaN or infinity."""


class DamagedScale(NonFiniteWeight):
    """A block scale is NaN or has a sign; what it scales has no agreed value."""


class DestinationBusy(CheckpointError):
    """Another process is writing the same checkpoint folder."""


class GraphError(M31Error):
    """The model graph is inconsistent: a shape, a layout or an unbound weight."""


class OpRefused(M31Error):
    """An op was called with inputs or attributes outside its declared domain."""


class BackendError(M31Error):
    """Finding, choosing, loading or running a backend failed."""

    exit_code = 3


class UnknownBackend(BackendError):
    """The named backend is not installed."""


class BackendRefused(BackendError):
    """The named backend is installed and cannot be used here."""


class NoUsableBackend(BackendError):
    """Automatic selection found nothing that it may use."""


class BackendTie(BackendError):
    """Two backends have the same score; the user must choose."""


class DuplicateBackend(BackendError):
    """Two distributions register a backend of the same name."""


class ManifestError(BackendError):
    """A backend's manifest is missing, malformed or contradicts itself."""


class BackendLoadFailed(BackendError):
    """Importing or constructing the chosen backend raised; the cause is chained."""


class NoKernel(BackendError):
    """The chosen backend has no kernel for an op of this model, and no declared fallback."""


class ContextLimitExceeded(M31Error):
    """More tokens than the backend or the model serves."""

    def __init__(self, who: str, limit: int, asked: int) -> None:
        self.who, self.limit, self.asked = who, limit, asked
        super().__init__(
            f"{who} serves at most {limit:,} tokens, asked for {asked:,}",
            fix="shorten the prompt, lower max_tokens, or raise max_context where it is what limits",
        )


class MemoryBudgetExceeded(M31Error):
    """An allocation would not fit the memory budget; nothing was allocated."""


class LayoutMismatch(M31Error):
    """Pages of another layout, or of none that this cache knows; nothing was imported."""


class PageError(M31Error):
    """A page of the KV cache was used against the rules of its life: a fault of the caller; nothing was changed."""


class PagesExhausted(PageError):
    """Fewer pages are free than a sequence needs; none was taken."""


class RequestError(M31Error):
    """A generation request is malformed: an empty prompt, a parameter out of range, a token id out of range."""


class TokenizerError(M31Error):
    """tokenizer.json is missing, malformed, or disagrees with config.json."""


class TemplateError(M31Error):
    """The chat template is missing, fails, or does something that the sandbox forbids."""


class CorpusError(M31Error):
    """The text to train on is missing, too small, or its token cache is damaged."""


class NonFiniteLogits(M31Error):
    """The model computed NaN or infinite logits; no token can be sampled from them."""


class ContractViolation(M31Error):
    """A backend breaks a rule of the contract (docs/sdk.md). `rule` is the rule's name, a key of `RULES` there."""

    def __init__(self, rule: str, what: str, *, where: str, expected: str | None = None) -> None:
        self.rule = rule
        super().__init__(f"breaks the rule '{rule}': {what}", where=where, expected=expected)


class SuiteError(M31Error):
    """The conformance suite, or a file that it was given, contradicts itself: an id used twice, a criterion that
    nonsense passes, a damaged record. No backend is to blame."""

    exit_code = 3


class NothingSelected(SuiteError):
    """No item of the conformance suite was selected: nothing was judged, which is no success."""

    exit_code = 2


class TrainingError(M31Error):
    """Training cannot start, continue or go on."""


class TrainingStateError(TrainingError):
    """The folder of a training run is damaged, or holds the run of another configuration."""


class TrainingDiverged(TrainingError):
    """The loss or a gradient became NaN or infinite; the last stored state is as it was."""
