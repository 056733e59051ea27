"""The anchor: the initial policy, frozen. It merges rollouts, writes criteria, and says how likely a rollout is."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_ext.chat import ChatBackend, ChatReply, generate_replies, render_conversation
from hf_ext.extras import require

require("trl", extra="trainers")

import torch  # noqa: E402
from accelerate.utils import gather_object, is_peft_model  # noqa: E402
from torch import nn  # noqa: E402
from trl.models import unwrap_model_for_generation  # noqa: E402
from trl.models.utils import disable_gradient_checkpointing  # noqa: E402
from trl.trainer.utils import create_model_from_path, get_config_model_id, use_adapter  # noqa: E402

from .prompts import defuse, special_tokens  # noqa: E402

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import GRPOTrainer

__all__ = ["Anchor", "BackendAnchor", "CallableAnchor", "PolicyAnchor", "resolve_anchor"]

Messages = Sequence[Mapping[str, Any]]
# Logits of so many values are made at a time when rollouts are scored.
SCORE_ELEMENTS = 2**25
DUMMY = [0]  # the prompt of a call that is made only because other processes make one
FROZEN_ADAPTER = "cat_anchor"


class Anchor:
    """A frozen model with its tokenizer.

    Args:
        model: Its parameters are frozen and it is put into evaluation mode.
        tokenizer: Of that model. Without a chat template the contents of messages are joined as plain text.
        batch_size: Prompts that are generated or scored together.
        top_p: Nucleus that is sampled from.
        template_kwargs: Handed to the chat template.
        name: For logs and cache keys.
    """

    can_score = True
    can_count = True
    synchronized = False  # whether the weights are sharded, so that every process must call alike

    def __init__(
        self,
        model: "PreTrainedModel | None",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        batch_size: int = 8,
        top_p: float = 1.0,
        template_kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.model = None if model is None else model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self.batch_size = batch_size
        self.top_p = top_p
        self.template_kwargs = dict(template_kwargs or {})
        self.name = name or f"transformers:{model.name_or_path or type(model).__name__}"

    @contextlib.contextmanager
    def active(self) -> Iterator["PreTrainedModel"]:
        """The model, ready to generate, in evaluation mode and without gradients."""
        with torch.no_grad():
            yield self.model

    @property
    def context(self) -> int | None:
        """Tokens that the model can read and write together, if its configuration says."""
        return getattr(self._config().get_text_config(), "max_position_embeddings", None)

    def _config(self) -> Any:
        return self.model.config

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self.tokenizer(defuse(text, self._special), add_special_tokens=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids)

    def ids_of(self, messages: Messages) -> list[int]:
        """Token ids that the model continues with its reply."""
        plain = not self.tokenizer.chat_template
        text = render_conversation(self.tokenizer, messages, plain_text=plain, template_kwargs=self.template_kwargs)
        return self.tokenizer(text, add_special_tokens=plain)["input_ids"]

    def count(self, messages: Messages) -> int:
        """Tokens of a conversation."""
        return len(self.ids_of(messages))

    def generate(
        self, conversations: Sequence[Messages], *, max_new_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> list[ChatReply]:
        """A reply for each conversation.

        Sampled replies depend on their own seed alone, not on what else is in the batch; the random state of the
        process is not touched.
        """
        # What it is shown was written by the policy, which must not end its turn.
        ids = [
            self.ids_of([{**message, "content": defuse(message["content"], self._special)} for message in messages])
            for messages in conversations
        ]
        wanted, seeds, too_long = len(ids), list(seeds), {}
        if self.synchronized and self.context is not None:
            # `generate_replies` leaves these out, and then this process would call the model less often.
            too_long = {i: len(row) for i, row in enumerate(ids) if len(row) + max_new_tokens > self.context}
        for i in too_long:
            ids[i] = DUMMY
        missing = self._missing(wanted)
        ids += [DUMMY] * missing
        seeds += [0] * missing
        if not ids:
            return []
        with self.active() as model:
            replies = generate_replies(
                model,
                self.tokenizer,
                ids,
                batch_size=self.batch_size,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=self.top_p,
                seed=seeds,
            )
        for i, length in too_long.items():
            replies[i] = ChatReply.failed(f"the prompt has {length} tokens, too many for {self.context} positions")
        return replies[:wanted]

    def score(self, pairs: Sequence[tuple[Any, str]]) -> list[float]:
        """Mean negative log-probability of the tokens of each completion, after its prompt; infinite if it has none.

        Args:
            pairs: Prompt (text or messages) and completion.
        """
        rows = []
        for prompt, completion in pairs:
            if isinstance(prompt, str):
                before = self.tokenizer(prompt)["input_ids"]
            else:
                before = self.ids_of(prompt)
            rows.append((before, self.encode(completion)))
        wanted = len(rows)
        rows += [([0], [0])] * self._missing(wanted)
        if not rows:
            return []
        losses = [float("inf")] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]) - len(rows[i][1]))
        with self.active() as model:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                for index, loss in zip(batch, _mean_nll(model, [rows[i] for i in batch])):
                    losses[index] = loss
        return losses[:wanted]

    def _missing(self, count: int) -> int:
        """How many dummy items make this process call the model as often as the busiest one."""
        return max(gather_object([count])) - count if self.synchronized else 0


def _mean_nll(model: "PreTrainedModel", rows: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    longest = max(len(after) for _, after in rows)
    # One more than the completion, also where a prompt is empty: its first token is predicted from something.
    width = max(longest + 1, *(len(before) + len(after) for before, after in rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (before, after) in enumerate(rows):  # padded on the left, so that completions end together
        tokens = torch.tensor([*before, *after])
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    ids, mask = ids.to(model.device), mask.to(model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    per_row = max(1, (longest + 1) * model.config.get_text_config().vocab_size)
    step = max(1, SCORE_ELEMENTS // per_row)
    losses = []
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        logits = model(
            input_ids=ids[part],
            attention_mask=mask[part],
            position_ids=positions[part],
            logits_to_keep=longest + 1,
            use_cache=False,
        ).logits[:, :-1]
        targets = ids[part, -longest:] if longest else ids[part, :0]
        nll = nn.functional.cross_entropy(logits[:, -longest:].float().transpose(1, 2), targets, reduction="none")
        for row, (before, after) in enumerate(rows[part]):
            # The first token of a completion needs something before it to be predicted from.
            count = len(after) if before else len(after) - 1
            losses.append(nll[row, longest - count :].mean().item() if count > 0 else float("inf"))
    return losses


class PolicyAnchor(Anchor):
    """The model in training, with its adapter off (or the frozen copy "ref" on), or as it is now.

    Args:
        trainer: Whose policy it is.
        adapter: `"off"`, the name of an adapter, or None for the policy as it is (it drifts: an ablation).
        **kwargs: See `Anchor`.
    """

    def __init__(self, trainer: "GRPOTrainer", adapter: str | None, **kwargs: Any) -> None:
        self.trainer = trainer
        self.adapter = adapter
        name = get_config_model_id(trainer.model.config)
        super().__init__(None, trainer._tokenizer, name=f"policy:{name}:{adapter or 'current'}", **kwargs)
        self.synchronized = trainer.is_fsdp_enabled or trainer._dist.is_zero3

    def _config(self) -> Any:
        return self.trainer.model.config

    @contextlib.contextmanager
    def active(self) -> Iterator["PreTrainedModel"]:
        """The policy with its adapter switched; on leaving, also by an exception, everything is as it was."""
        trainer = self.trainer
        policy = trainer.accelerator.unwrap_model(trainer.model)
        with (
            preserved(policy),
            disable_gradient_checkpointing(policy, trainer.args.gradient_checkpointing_kwargs),
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            ) as model,
            torch.no_grad(),
            trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
        ):
            model.eval()
            if self.adapter is None:
                yield model
            else:
                with use_adapter(model, None if self.adapter == "off" else self.adapter):
                    yield model


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back training modes, `requires_grad` flags and `use_cache` when the block ends, however it does.

    Switching adapters sets the flags of all of them, and a user may have frozen some.
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    config = model.config.get_text_config()
    use_cache = getattr(config, "use_cache", None)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        if use_cache is not None:
            config.use_cache = use_cache


class BackendAnchor:
    """An anchor behind a chat back end, such as `hf_ext.chat.EndpointChat`."""

    can_score = can_count = synchronized = False
    context = None

    def __init__(self, backend: ChatBackend, *, top_p: float = 1.0) -> None:
        self.backend = backend
        self.top_p = top_p
        self.name = backend.name

    def generate(
        self, conversations: Sequence[Messages], *, max_new_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> list[ChatReply]:
        """A reply for each conversation; failed ones have an error."""
        if not conversations:
            return []
        return self.backend.complete(
            conversations, max_new_tokens=max_new_tokens, temperature=temperature, top_p=self.top_p, seed=seeds[0]
        )


class CallableAnchor:
    """An anchor that is a function of one conversation: `fn(messages) -> str`."""

    can_score = can_count = synchronized = False
    context = None

    def __init__(self, function: Callable[[Messages], str]) -> None:
        self.function = function
        self.name = f"callable:{getattr(function, '__qualname__', type(function).__name__)}"

    def generate(
        self, conversations: Sequence[Messages], *, max_new_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> list[ChatReply]:
        """A reply for each conversation; what the function raises becomes the reply's error."""
        return [self._reply(messages) for messages in conversations]

    def _reply(self, messages: Messages) -> ChatReply:
        try:
            text = self.function(messages)
        except Exception as error:
            return ChatReply.failed(repr(error))
        if not isinstance(text, str):
            return ChatReply.failed(f"it returned {text!r:.60}, not a text")
        return ChatReply(text, "stop")


# --- which one -----------------------------------------------------------------------------------------------------


def resolve_anchor(trainer: "GRPOTrainer", anchor: Any, *, passed_instance: bool, loading: Mapping[str, Any]) -> Any:
    """Make the anchor of a trainer whose host part is built.

    Args:
        trainer: The trainer.
        anchor: None for the initial policy, `"policy"`, a model, its path, a chat back end, or `fn(messages) -> str`.
        passed_instance: Whether the policy was passed as a model and not by name.
        loading: Arguments of `from_pretrained` for a checkpoint that is loaded again.

    Raises:
        ValueError: The choice would not be frozen.
        TypeError: It is none of these.
    """
    args = trainer.args
    common = {
        "batch_size": args.anchor_batch_size,
        "top_p": args.top_p,
        "template_kwargs": trainer.chat_template_kwargs,
    }
    if anchor is None:
        return _initial_policy(trainer, common, passed_instance=passed_instance, loading=loading)
    if anchor == "policy":
        return PolicyAnchor(trainer, None, **common)
    if isinstance(anchor, nn.Module):
        if trainer.accelerator.unwrap_model(trainer.model) is anchor:
            raise ValueError(
                'anchor is the model in training; leave it out to freeze its start, or say anchor="policy"'
            )
        tokenizer = _tokenizer_of(anchor, trainer)
        return Anchor(_placed(trainer, anchor), tokenizer, **common)
    if isinstance(anchor, str):
        model = create_model_from_path(anchor, **loading)
        return Anchor(_placed(trainer, model), _tokenizer_of(model, trainer), **common)
    if isinstance(anchor, ChatBackend):
        return BackendAnchor(anchor, top_p=args.top_p)
    if callable(anchor):
        return CallableAnchor(anchor)
    raise TypeError(
        f"anchor is a {type(anchor).__name__}; it must be a model, its path, a chat back end, fn(messages) -> str, "
        '"policy", or None for the initial policy'
    )


def _initial_policy(
    trainer: "GRPOTrainer", common: dict[str, Any], *, passed_instance: bool, loading: Mapping[str, Any]
) -> Anchor:
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if is_peft_model(policy):
        if "ref" in policy.peft_config:
            return PolicyAnchor(trainer, "ref", **common)
        if passed_instance or not _starts_at_base(policy):
            freeze_adapter(policy)
            return PolicyAnchor(trainer, FROZEN_ADAPTER, **common)
        return PolicyAnchor(trainer, "off", **common)
    source = trainer.args.anchor_source
    named = {**common, "name": f"initial:{get_config_model_id(policy.config)}"}
    if passed_instance and source != "path":
        same = trainer.ref_model is not None and same_weights(
            policy, trainer.accelerator.unwrap_model(trainer.ref_model)
        )
        if source == "instance" or not same:
            return Anchor(_placed(trainer, frozen_copy(policy)), trainer._tokenizer, **named)
    if trainer.ref_model is not None:
        return HostAnchor(trainer, **named)
    model = create_model_from_path(get_config_model_id(policy.config), **loading)
    return Anchor(_placed(trainer, model), trainer._tokenizer, **named)


class HostAnchor(Anchor):
    """The reference model that the host built for its KL term."""

    def __init__(self, trainer: "GRPOTrainer", **kwargs: Any) -> None:
        super().__init__(trainer.ref_model, trainer._tokenizer, **kwargs)
        self.trainer = trainer
        self.synchronized = trainer.is_fsdp_enabled or trainer._dist.is_zero3

    def _config(self) -> Any:
        return self.trainer.model.config

    @contextlib.contextmanager
    def active(self) -> Iterator["PreTrainedModel"]:
        """The reference model, its shards gathered."""
        trainer = self.trainer
        with (
            unwrap_model_for_generation(
                trainer.ref_model, trainer.accelerator, gather_deepspeed3_params=trainer.args.ds3_gather_for_generation
            ) as model,
            torch.no_grad(),
            trainer._dist.summon_full_params(trainer.ref_model, recurse=False),
        ):
            yield model


def _starts_at_base(policy: "PeftModel") -> bool:
    """Whether a new adapter changes nothing yet, as LoRA's does with its usual initialisation and PiSSA's does not."""
    ids = torch.arange(1, 9, device=policy.device)[None] % policy.config.get_text_config().vocab_size
    with preserved(policy), torch.no_grad():
        policy.eval()
        with_adapter = policy(input_ids=ids, use_cache=False).logits
        with policy.disable_adapter():
            return torch.equal(with_adapter, policy(input_ids=ids, use_cache=False).logits)


def freeze_adapter(policy: "PeftModel") -> None:
    """Keep a frozen copy of the active adapter beside it: without adapters the model is not the initial policy.

    Not called "ref": that name would change what the host's KL term compares with.
    """
    active = policy.active_adapter
    config = copy.deepcopy(policy.peft_config[active])
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = False  # some ways to start (PiSSA) would change the base weights
    with preserved(policy):
        policy.add_adapter(FROZEN_ADAPTER, config)
        tensors = dict(policy.named_parameters())
        for name, tensor in tensors.items():
            if f".{FROZEN_ADAPTER}" in name:
                tensor.data.copy_(tensors[name.replace(f".{FROZEN_ADAPTER}", f".{active}")].data)
                tensor.requires_grad_(False)


def _placed(trainer: "GRPOTrainer", model: nn.Module) -> nn.Module:
    return trainer.accelerator.unwrap_model(trainer.accelerator.prepare_model(model, evaluation_mode=True))


def _tokenizer_of(model: "PreTrainedModel", trainer: "GRPOTrainer") -> "PreTrainedTokenizerBase":
    """Its own where it has one; the policy's for a model that comes from memory."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.name_or_path, trust_remote_code=trainer.args.trust_remote_code)
    except (OSError, ValueError):
        return trainer._tokenizer


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy that no training step moves.

    TRL puts a `forward` on the instance whose inner one is bound to the original: a copy that kept it would compute
    with the weights in training. The copy has its class's `forward`.
    """
    copied = copy.deepcopy(model)
    vars(copied).pop("forward", None)
    return copied.eval().requires_grad_(False)


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether the first, a middle and the last tensor of two models of one shape are equal, bit for bit."""
    first, second = dict(a.named_parameters()), dict(b.named_parameters())
    names = list(first)
    if not names or names != list(second):
        return False
    return all(
        first[name].shape == second[name].shape
        and torch.equal(first[name].cpu(), second[name].to(first[name].dtype).cpu())
        for name in (names[0], names[len(names) // 2], names[-1])
    )
