"""RecoverConfig: what a recovery run does."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

RecoveryMethod = Literal["distill", "lora"]
LoraOrder = Literal["sequential", "joint"]
METHODS: tuple[RecoveryMethod, ...] = get_args(RecoveryMethod)
LORA_ORDERS: tuple[LoraOrder, ...] = get_args(LoraOrder)

# The peak rate where none is given; see the recovery page for how they were found.
LEARNING_RATES: dict[RecoveryMethod, float] = {"distill": 1e-2, "lora": 1e-3}


@dataclass(frozen=True)
class RecoverConfig:
    """How a compressed model is trained.

    Attributes:
        method: `distill` trains the factors themselves towards the dense model's logits and hidden
            states; `lora` trains adapters on them on the next token, and merges them.
        minutes: the time budget of training and its evaluations. The schedule runs over it, so
            the number of steps depends on the machine.
        steps: instead of `minutes`: the same steps on every machine.
        seqlen: tokens in a block; None takes the smaller of 512 and the model's limit.
        batch_tokens: of a step.
        learning_rate: at the schedule's peak; None takes the method's. For `distill` a share of
            each factor's root mean square, about what AdamW moves every element by in a step;
            for `lora` absolute.
        hidden_weight: of the hidden states' relative error, added to the logits' KL divergence.
        lora_rank: of the adapters.
        lora_order: `sequential` trains those of u, then those of v (SVD-LLM, section 3.3);
            `joint` both at once.
        seed: of the order of the data and of the adapters.

    Raises:
        ValueError: a value is out of range.
    """

    method: RecoveryMethod = "distill"
    minutes: float = 10.0
    steps: int | None = None
    seqlen: int | None = None
    batch_tokens: int = 2048
    learning_rate: float | None = None
    hidden_weight: float = 1.0
    lora_rank: int = 16
    lora_order: LoraOrder = "sequential"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every value."""
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {self.method!r}")
        if self.lora_order not in LORA_ORDERS:
            raise ValueError(
                f"lora_order must be one of {', '.join(LORA_ORDERS)}; got {self.lora_order!r}"
            )
        if not 0 < self.minutes < float("inf"):
            raise ValueError(f"minutes must be a positive number, got {self.minutes}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be a positive number, got {self.learning_rate}")
        if not 0 <= self.hidden_weight < float("inf"):
            raise ValueError(f"hidden_weight must be at least 0, got {self.hidden_weight}")
        for name in ("steps", "batch_tokens", "lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def peak_rate(self) -> float:
        """The learning rate at the schedule's peak."""
        return self.learning_rate or LEARNING_RATES[self.method]

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a JSON-compatible dict."""
        return asdict(self)
