"""The shape of a looped model, independent of its family.

A family module (`models/ouro.py`) reads its own `config.json` into this record; nothing
else in the project looks at family fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one looped model.

    Attributes:
        family: name of the family module that read it.
        hidden: width H of the residual stream.
        intermediate: width I of the gated MLP.
        heads: query heads A.
        kv_heads: key/value heads K; each serves A/K consecutive query heads.
        head_dim: width D of one head (not necessarily H/A).
        vocab: number V of token ids.
        loops: T, how often the core is applied.
        layers: L, layers in the core (the shared stack).
        prelude_layers, coda_layers: layers run once before and after the loops; every
            supported family has 0 of both.
        max_positions: longest sequence the model accepts, in tokens.
        rope_theta: base of the rotary frequencies.
        rms_eps: epsilon of every RMS norm.
        tied: the head is the embedding matrix.
        bos_id, pad_id: token ids, None where the config names none.
        eos_ids: ids that end a text, in the order the config gives them.
        exit_threshold: the threshold shipped with the checkpoint (informative: a schedule
            names its own).
        source: the `config.json` as read, written back unchanged by a save.
    """

    family: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    loops: int
    layers: int
    max_positions: int
    rope_theta: float
    rms_eps: float
    tied: bool
    prelude_layers: int = 0
    coda_layers: int = 0
    bos_id: int | None = None
    pad_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    exit_threshold: float = 1.0
    source: dict = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        sizes = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "loops",
                 "layers", "max_positions")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"model config: {name} = {value!r} must be a positive integer")
        for name in ("rope_theta", "rms_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 < value < float("inf"):
                raise ValueError(f"model config: {name} = {value!r} must be a positive number")
        if self.prelude_layers or self.coda_layers:
            raise ValueError(
                f"model config: prelude_layers = {self.prelude_layers}, coda_layers = "
                f"{self.coda_layers}: layers outside the loops are not supported yet; use a "
                "model whose whole stack is looped")
        if self.heads % self.kv_heads:
            raise ValueError(f"model config: heads = {self.heads} is not a multiple of "
                             f"kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model config: head_dim = {self.head_dim} must be even (rotary "
                             "embedding pairs its halves)")

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical weight name -> shape, in the one order used for files and flat vectors."""
        hidden, inner = self.hidden, self.intermediate
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab, hidden)}
        for layer in range(self.layers):
            shapes |= {f"core.{layer}.{name}": shape for name, shape in (
                ("norm_attn_in", (hidden,)), ("q", (query, hidden)), ("k", (key, hidden)),
                ("v", (key, hidden)), ("o", (hidden, query)), ("norm_attn_out", (hidden,)),
                ("norm_mlp_in", (hidden,)), ("gate", (inner, hidden)), ("up", (inner, hidden)),
                ("down", (hidden, inner)), ("norm_mlp_out", (hidden,)))}
        shapes |= {"norm": (hidden,), "exit_gate.weight": (1, hidden), "exit_gate.bias": (1,)}
        if not self.tied:
            shapes["head"] = (self.vocab, hidden)
        return shapes

    def kv_bytes(self, dtype_bytes: int) -> int:
        """Bytes of keys and values for one token at one loop."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes
