"""Chat back ends: conversations in, one reply each out, from a transformers model or an OpenAI-compatible endpoint.

Both have the method `complete` of `ChatBackend`. A conversation that could not be answered gives a reply with `error`
and no text, so that one bad item never costs a batch; what is wrong with the call itself is raised before work starts.
"""

import os
import urllib.parse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hf_ext.extras import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "ChatBackend",
    "ChatReply",
    "Conversation",
    "EndpointChat",
    "TransformersChat",
    "generate_replies",
    "render_conversation",
]

Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with `role` and `content`."""

# Asking again gets the same answer: wrong key, no permission, no such model or address.
_FATAL = (401, 403, 404)


@dataclass(frozen=True)
class ChatReply:
    """The answer to one conversation, or why there is none.

    Attributes:
        text: What the model wrote, without the stop string; None if there is an error.
        finish_reason: `"stop"` (it ended by itself or at a stop string), `"length"` (cut by the limit), what else an
            endpoint says, or `"error"`.
        prompt_tokens, completion_tokens: Counts; None where the endpoint gives none.
        error: Why there is no text. It never holds an API key.
        fatal: Whether every further call would fail alike (wrong key, no such model), so that waiting does not help.
    """

    text: str | None
    finish_reason: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    fatal: bool = False

    @classmethod
    def failed(cls, error: str, *, fatal: bool = False) -> "ChatReply":
        """A reply that has an error instead of a text."""
        return cls(None, "error", error=error, fatal=fatal)


@runtime_checkable
class ChatBackend(Protocol):
    """What answers conversations."""

    name: str
    """Identifies the model in logs and cache keys; holds no secret."""

    def complete(
        self,
        conversations: Sequence[Conversation],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> list[ChatReply]:
        """Answer each conversation; replies come in the order of the conversations.

        Args:
            conversations: Lists of messages, each with `role` and `content`.
            max_new_tokens: Limit on each reply.
            temperature: 0 takes the most likely token at each step.
            top_p: Nucleus that is sampled from.
            stop: Strings that end a reply; the reply does not contain them.
            seed: Of the sampling; nothing outside is reseeded or advanced.

        Raises:
            ValueError: A bad argument or a malformed conversation, before anything is sent or computed.
        """
        ...


def _check_call(
    conversations: Sequence[Conversation], max_new_tokens: int, temperature: float, top_p: float, stop: Sequence[str]
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop is {stop!r}; it must be a list of strings that are not empty")
    for index, conversation in enumerate(conversations):
        _check_conversation(conversation, f"conversation {index}")


def _check_conversation(conversation: Conversation, what: str = "the conversation") -> None:
    if isinstance(conversation, (str, Mapping)) or not conversation:
        raise ValueError(f"{what} is {conversation!r:.60}; it must be a list of messages with role and content")
    for message in conversation:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ValueError(f"{what} has the message {message!r:.60}; a message is a mapping with role and content")


# --- a transformers model ------------------------------------------------------------------------------------------


def render_conversation(
    tokenizer: "PreTrainedTokenizerBase",
    conversation: Conversation,
    *,
    plain_text: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that a model continues with its reply.

    Args:
        tokenizer: Its chat template is used, with the prompt for a reply.
        conversation: Messages with `role` and `content`.
        plain_text: For a base model without a template: the contents joined by empty lines, the roles left out, and
            one more line break.
        template_kwargs: Handed to the template, for example `{"enable_thinking": False}`.

    Raises:
        ValueError: The tokenizer has no chat template and `plain_text` is off.
    """
    _check_conversation(conversation)
    if plain_text:
        return "\n\n".join(str(message["content"]) for message in conversation) + "\n"
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; use an "
            "instruction-tuned model, set tokenizer.chat_template, or pass plain_text=True to join the messages "
            "without roles"
        )
    return tokenizer.apply_chat_template(
        [dict(message) for message in conversation],
        tokenize=False,
        add_generation_prompt=True,
        **(template_kwargs or {}),
    )


def generate_replies(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    seed: int | Sequence[int] = 0,
) -> list[ChatReply]:
    """Continue prompts of token ids, padded on the left, in batches of similar length.

    The model's own sampling settings (`generation_config`) are not used, except for its end-of-sequence tokens.
    Sampling draws from a generator forked for this call; the mode of the model (training or not) is put back.

    Args:
        model: A decoder-only model.
        tokenizer: Decodes the continuations; special tokens are left out of the text.
        prompts: Token ids of each prompt, as many as there are.
        batch_size: Prompts that are generated together.
        max_new_tokens, temperature, top_p, stop: See `ChatBackend.complete`.
        seed: One for the call, or one for each prompt: then a sampled reply does not depend on what else is asked.

    Returns:
        A reply for each prompt. One too long for the model's positions has an error.
    """
    import torch
    from transformers import GenerationConfig

    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    eos = model.generation_config.eos_token_id
    eos = tokenizer.eos_token_id if eos is None else eos
    ends = [eos] if isinstance(eos, int) else list(eos or [])
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends or [0])[0]
    by_row = not isinstance(seed, int)
    if by_row and len(seed) != len(prompts):
        raise ValueError(f"seed has {len(seed)} numbers for {len(prompts)} prompts; give one for each, or one for all")
    sampling = {"do_sample": False}
    if temperature > 0 and not by_row:
        sampling = {"do_sample": True, "temperature": float(temperature), "top_p": float(top_p), "top_k": 0}
    # Whatever is None here would be taken from the model's own file.
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        use_cache=True,
        eos_token_id=ends or None,
        pad_token_id=pad,
        stop_strings=list(stop) or None,
        **sampling,
    )
    replies: list[ChatReply | None] = [None] * len(prompts)
    fitting = []
    for index, ids in enumerate(prompts):
        if not ids:
            replies[index] = ChatReply.failed("the prompt is empty")
        elif context is not None and len(ids) + max_new_tokens > context:
            replies[index] = ChatReply.failed(
                f"the prompt has {len(ids)} tokens; with {max_new_tokens} new ones that is more than the model's "
                f"{context} positions"
            )
        else:
            fitting.append(index)
    fitting.sort(key=lambda index: -len(prompts[index]))  # the largest batch first: too large shows at once
    training = model.training
    devices = [model.device.index or 0] if model.device.type == "cuda" else []
    try:
        model.eval()
        with torch.random.fork_rng(devices), torch.no_grad():
            if not by_row:
                torch.manual_seed(seed)
            for start in range(0, len(fitting), batch_size):
                batch = fitting[start : start + batch_size]
                samplers = []
                if by_row and temperature > 0:
                    samplers.append(_row_sampler([seed[i] for i in batch], temperature, top_p, model.device))
                width = len(prompts[batch[0]])
                ids = torch.tensor([[pad] * (width - len(prompts[i])) + list(prompts[i]) for i in batch])
                mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch])
                written = model.generate(
                    input_ids=ids.to(model.device),
                    attention_mask=mask.to(model.device),
                    generation_config=config,
                    logits_processor=samplers,
                    **({"tokenizer": tokenizer} if stop else {}),
                )
                for index, tokens in zip(batch, written[:, width:].tolist()):
                    replies[index] = _reply_of(tokenizer, tokens, ends, stop, len(prompts[index]))
    finally:
        model.train(training)
    return replies


def _row_sampler(seeds: Sequence[int], temperature: float, top_p: float, device: Any) -> Any:
    """A logits processor after which the largest logit is a sample, drawn for each row from a generator of its own.

    The largest of logits plus Gumbel noise is distributed as a sample of their softmax.
    """
    import torch
    from transformers import LogitsProcessor, TopPLogitsWarper

    class RowSampler(LogitsProcessor):
        def __init__(self) -> None:
            self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
            self.nucleus = TopPLogitsWarper(top_p) if top_p < 1 else None

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = scores.float() / temperature
            if self.nucleus is not None:
                scores = self.nucleus(input_ids, scores)
            noise = [torch.empty_like(scores[0]).exponential_(generator=generator) for generator in self.generators]
            return scores - torch.stack(noise).log()

    return RowSampler()


def _reply_of(
    tokenizer: "PreTrainedTokenizerBase", tokens: list[int], ends: list[int], stop: Sequence[str], prompt_tokens: int
) -> ChatReply:
    """Cut a continuation at its end token or stop string; what follows in its row is padding."""
    end = next((i for i, token in enumerate(tokens) if token in ends), None)
    kept = tokens if end is None else tokens[:end]
    text = tokenizer.decode(kept, skip_special_tokens=True)
    count = len(kept) + (end is not None)
    found = min((position for string in stop if (position := text.find(string)) >= 0), default=None)
    if found is not None:
        # The row ended with the token that completed the stop string; the others are padding.
        prefixes = (tokenizer.decode(kept[:i], skip_special_tokens=True) for i in range(1, len(kept) + 1))
        count = next(i for i, prefix in enumerate(prefixes, 1) if any(string in prefix for string in stop))
        text = text[:found]
    reason = "length" if end is None and found is None else "stop"
    return ChatReply(text, reason, prompt_tokens, count)


class TransformersChat:
    """Answer conversations with a transformers model in this process.

    Args:
        model: A model, or a name or folder to load one from.
        tokenizer: Its tokenizer. Default: the one of the folder or of `model.name_or_path`.
        batch_size: Conversations that are generated together.
        plain_text: For a base model without a chat template: join the messages by empty lines, without their roles.
        template_kwargs: Handed to the chat template, for example `{"enable_thinking": False}`.
        **load_kwargs: For `from_pretrained`, if `model` is a name: `dtype`, `device_map`, `revision` ...

    Raises:
        ValueError: The tokenizer has no chat template and `plain_text` is off, or another bad argument.

    Example:
        >>> chat = TransformersChat("HuggingFaceTB/SmolLM2-135M-Instruct")
        >>> chat.complete([[{"role": "user", "content": "Hello"}]], max_new_tokens=20)[0].text
    """

    def __init__(
        self,
        model: "PreTrainedModel | str | os.PathLike[str]",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        batch_size: int = 8,
        plain_text: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        **load_kwargs: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        by_name = isinstance(model, (str, os.PathLike))
        if load_kwargs and not by_name:
            raise ValueError(f"{', '.join(load_kwargs)}: for loading a model, but this one is loaded already")
        if tokenizer is None:
            source = model if by_name else model.name_or_path
            if not source:
                raise ValueError("this model does not know where it comes from; pass its tokenizer too")
            tokenizer = AutoTokenizer.from_pretrained(source)
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.plain_text = plain_text
        self.template_kwargs = dict(template_kwargs or {})
        # A missing template should not wait until the model is loaded, or until the first reward is due.
        self._ids([{"role": "user", "content": "x"}])
        if by_name:
            model = AutoModelForCausalLM.from_pretrained(model, **load_kwargs)
            model.eval().requires_grad_(False)
        self.model = model
        self.name = f"transformers:{model.name_or_path or type(model).__name__}"

    def __repr__(self) -> str:
        return f"TransformersChat({self.name.partition(':')[2]!r}, batch_size={self.batch_size})"

    def _ids(self, conversation: Conversation) -> list[int]:
        text = render_conversation(
            self.tokenizer, conversation, plain_text=self.plain_text, template_kwargs=self.template_kwargs
        )
        # A template writes its own special tokens.
        return self.tokenizer(text, add_special_tokens=self.plain_text)["input_ids"]

    def complete(
        self,
        conversations: Sequence[Conversation],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> list[ChatReply]:
        """See `ChatBackend.complete`. Sampled replies depend on what is in the batch, greedy ones do not."""
        _check_call(conversations, max_new_tokens, temperature, top_p, stop)
        return generate_replies(
            self.model,
            self.tokenizer,
            [self._ids(conversation) for conversation in conversations],
            batch_size=self.batch_size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stop=stop,
            seed=seed,
        )


# --- an endpoint ---------------------------------------------------------------------------------------------------


class EndpointChat:
    """Answer conversations with an OpenAI-compatible chat endpoint (vLLM, llama.cpp, TGI, Ollama, a vendor's).

    Waiting, back-off and connections are those of the `openai` client: timeouts, broken connections and the answers
    408, 409, 429 and 5xx are tried again, with growing pauses or after the time that the server asks for; other
    refusals are not. It needs the extra `endpoints`.

    Args:
        base_url: Address up to and with `/v1`, for example `"http://localhost:8000/v1"`.
        model: Name of the model at the endpoint.
        api_key: The key. Default: that of the environment variable, read at the first call; a server that has none
            gets a placeholder. A key given here is not in `repr`, logs or error texts and does not travel in a pickle.
        api_key_variable: Name of the environment variable.
        max_concurrency: Requests under way at the same time.
        timeout: Seconds that one attempt may wait for the server.
        max_retries: Further attempts after the first.
        options: Added to each request and winning over its fields; None leaves a field out. For models that want
            `max_completion_tokens`: `{"max_tokens": None, "max_completion_tokens": 50, "temperature": None}`.

    Raises:
        ImportError: The `openai` client is not installed.
        ValueError: A bad argument.

    Example:
        >>> chat = EndpointChat("http://localhost:8000/v1", "Qwen/Qwen3-4B")
        >>> chat.complete([[{"role": "user", "content": "Hello"}]], max_new_tokens=20)[0].text
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        api_key_variable: str = "OPENAI_API_KEY",
        max_concurrency: int = 16,
        timeout: float = 60.0,
        max_retries: int = 3,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        parts = urllib.parse.urlsplit(base_url or "")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url is {base_url!r}; it must be an address such as http://localhost:8000/v1")
        if parts.username or parts.password or parts.query:
            # It is written into logs and cards, where a secret must not be.
            raise ValueError("base_url has a user name, a password or a query; give the key as api_key instead")
        if not model:
            raise ValueError(f"model is {model!r}; it must be the name of a model at {base_url}")
        for name, value, least in (("max_concurrency", max_concurrency, 1), ("max_retries", max_retries, 0)):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}; it must be a number of seconds above 0")
        require("openai", extra="endpoints")
        self.base_url = base_url
        self.model = model
        self.api_key_variable = api_key_variable
        self.max_concurrency = max_concurrency
        self.timeout = timeout
        self.max_retries = max_retries
        self.options = dict(options or {})
        self.name = f"endpoint:{model}@{base_url}"
        self._api_key = api_key
        self._key_was_given = api_key is not None
        self._client: Any = None

    def __repr__(self) -> str:
        return (
            f"EndpointChat({self.base_url!r}, {self.model!r}, max_concurrency={self.max_concurrency}, "
            f"timeout={self.timeout}, max_retries={self.max_retries})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_api_key": None, "_client": None}

    def _key(self) -> str:
        key = self._api_key or os.environ.get(self.api_key_variable)
        if key is None and self._key_was_given:
            raise ValueError(
                f"the API key of {self.name} was given as an argument, which does not travel to another process; set "
                f"the environment variable {self.api_key_variable}"
            )
        return key or "none"

    def complete(
        self,
        conversations: Sequence[Conversation],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> list[ChatReply]:
        """See `ChatBackend.complete`. What the server does with `seed` is its own affair."""
        _check_call(conversations, max_new_tokens, temperature, top_p, stop)
        if self._client is None:
            import openai

            self._client = openai.OpenAI(
                base_url=self.base_url, api_key=self._key(), timeout=self.timeout, max_retries=self.max_retries
            )
        fields = {"max_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        if stop:
            fields["stop"] = list(stop)
        fields |= self.options
        body = {name: value for name, value in fields.items() if value is not None}
        pool = ThreadPoolExecutor(min(self.max_concurrency, len(conversations)) or 1, "hf-ext-chat")
        try:
            return list(pool.map(lambda conversation: self._ask(conversation, body), conversations))
        finally:
            # After Ctrl-C, what has not been sent is not sent.
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, conversation: Conversation, body: Mapping[str, Any]) -> ChatReply:
        import openai

        messages = [dict(message) for message in conversation]
        try:
            # As `extra_body`: fields that this version of the client has no name for pass too.
            answer = self._client.chat.completions.create(model=self.model, messages=messages, extra_body=dict(body))
            choice = answer.choices[0]
            text = choice.message.content
        except openai.APIStatusError as error:
            return self._failed(f"HTTP {error.status_code}: {error.message}", error.status_code in _FATAL)
        except openai.APITimeoutError:
            return self._failed(f"no answer within {self.timeout:g} s, {self.max_retries + 1} times")
        except openai.APIError as error:
            return self._failed(f"{error.message} ({error.__cause__ or type(error).__name__})")
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            # The client hands over whatever came: a page of HTML as a string, or an object without choices.
            return self._failed(f"the answer is not that of a chat endpoint ({type(error).__name__}: {error})")
        if not isinstance(text, str):
            return self._failed(f"the answer has no text (finish_reason {choice.finish_reason!r})")
        usage = answer.usage
        counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
        return ChatReply(text, choice.finish_reason or "stop", *counts)

    def _failed(self, error: str, fatal: bool = False) -> ChatReply:
        # Some servers repeat the key in their refusal.
        key = self._client.api_key
        if len(key) > 4:
            error = error.replace(key, "***")
        return ChatReply.failed(" ".join(error.split())[:500], fatal=fatal)
