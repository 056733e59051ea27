"""Chat back ends: an endpoint on this machine that fails on purpose, and a tiny model."""

import copy
import json
import logging
import pickle
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from hf_ext.chat import ChatBackend, ChatReply, EndpointChat, TransformersChat, generate_replies, render_conversation

KEY = "sk-secret-0123456789"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<reply>{% endif %}"
)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def answer(text: str) -> dict:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


class Endpoint:
    """A server whose answer to each request is what `script(request body, number)` gives: (status, body, seconds)."""

    def __init__(self, script):
        self.requests, self.keys, self.running, self.most = [], [], 0, 0
        lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    endpoint.requests.append(body)
                    endpoint.keys.append(self.headers["Authorization"])
                    number = len(endpoint.requests)
                    endpoint.running += 1
                    endpoint.most = max(endpoint.most, endpoint.running)
                status, payload, seconds = script(body, number)
                time.sleep(seconds)
                with lock:
                    endpoint.running -= 1
                data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("retry-after-ms", "5")  # which the client waits instead of its back-off
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client has given up

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def endpoint():
    """`endpoint(script)`: see `Endpoint`; closed at the end."""
    servers = []

    def start(script) -> Endpoint:
        servers.append(Endpoint(script))
        return servers[-1]

    yield start
    for one in servers:
        one.server.shutdown()
        one.server.server_close()


def echo(body, number):
    return 200, answer("re: " + body["messages"][-1]["content"]), 0


# --- the endpoint --------------------------------------------------------------------------------------------------


def test_replies_come_in_the_order_of_the_conversations_with_their_counts(endpoint):
    def slow_first(body, number):
        status, payload, _ = echo(body, number)
        return status, payload, 0.2 if body["messages"][-1]["content"] == "0" else 0

    server = endpoint(slow_first)
    chat = EndpointChat(server.url, "m", KEY)
    assert isinstance(chat, ChatBackend) and chat.name == f"endpoint:m@{server.url}"
    replies = chat.complete([ask(str(i)) for i in range(5)], max_new_tokens=3, stop=["\n"], seed=4)
    assert replies == [ChatReply(f"re: {i}", "stop", 7, 2) for i in range(5)]
    request = server.requests[0]
    assert request.pop("messages")[0]["role"] == "user"
    assert request == {"model": "m", "max_tokens": 3, "temperature": 0.0, "top_p": 1.0, "stop": ["\n"], "seed": 4}
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert chat.complete([], max_new_tokens=3) == []


def test_options_win_over_the_fields_and_none_leaves_one_out(endpoint):
    server = endpoint(echo)
    options = {"max_tokens": None, "max_completion_tokens": 50, "seed": None, "chat_template_kwargs": {"x": False}}
    EndpointChat(server.url, "m", options=options).complete([ask("a")], max_new_tokens=3)
    request = server.requests[0]
    assert request["max_completion_tokens"] == 50 and request["chat_template_kwargs"] == {"x": False}
    assert "max_tokens" not in request and "seed" not in request


def test_a_busy_server_is_asked_again(endpoint):
    server = endpoint(lambda body, n: (429, {"error": {"message": "busy"}}, 0) if n < 3 else echo(body, n))
    assert EndpointChat(server.url, "m").complete([ask("a")], max_new_tokens=3)[0].text == "re: a"
    assert len(server.requests) == 3


def test_a_broken_server_is_an_error_after_the_retries_and_the_other_items_are_answered(endpoint):
    def script(body, number):
        return (
            (500, {"error": {"message": "on fire"}}, 0) if body["messages"][0]["content"] == "bad" else echo(body, 0)
        )

    server = endpoint(script)
    bad, good = EndpointChat(server.url, "m", max_retries=2).complete([ask("bad"), ask("b")], max_new_tokens=3)
    assert bad.text is None and bad.finish_reason == "error" and not bad.fatal
    assert "HTTP 500" in bad.error and "on fire" in bad.error
    assert good.text == "re: b" and good.error is None
    assert len(server.requests) == 3 + 1


def test_a_server_that_does_not_answer_is_an_error_that_says_how_long_was_waited(endpoint):
    server = endpoint(lambda body, n: (*echo(body, n)[:2], 1.0))
    chat = EndpointChat(server.url, "m", timeout=0.1, max_retries=0)
    start = time.perf_counter()
    (reply,) = chat.complete([ask("a")], max_new_tokens=3)
    assert reply.error == "no answer within 0.1 s, 1 times" and not reply.fatal
    assert time.perf_counter() - start < 0.9  # it did not wait for the answer


def test_a_server_that_is_not_there_is_an_error():
    (reply,) = EndpointChat("http://127.0.0.1:9/v1", "m", max_retries=0).complete([ask("a")], max_new_tokens=3)
    assert "Connection error" in reply.error and not reply.fatal


@pytest.mark.parametrize(
    "payload, says",
    [
        (b'{"choices": [', "not that of a chat endpoint"),
        (b"<html>a proxy</html>", "not that of a chat endpoint"),
        ({"object": "list"}, "not that of a chat endpoint"),
        ({**answer("x"), "choices": []}, "not that of a chat endpoint"),
        (answer(None), "no text"),
    ],
)
def test_an_answer_that_is_none_is_an_error(endpoint, payload, says):
    server = endpoint(lambda body, n: (200, payload, 0))
    (reply,) = EndpointChat(server.url, "m").complete([ask("a")], max_new_tokens=3)
    assert reply.text is None and says in reply.error


def test_a_wrong_key_is_fatal_is_not_tried_again_and_is_not_repeated_in_the_error(endpoint):
    refusal = {"error": {"message": f"Incorrect API key provided: {KEY}", "code": "invalid_api_key"}}
    server = endpoint(lambda body, n: (401, refusal, 0))
    (reply,) = EndpointChat(server.url, "m", KEY).complete([ask("a")], max_new_tokens=3)
    assert reply.fatal and "HTTP 401" in reply.error and "***" in reply.error and KEY not in reply.error
    assert len(server.requests) == 1


def test_no_more_requests_are_under_way_than_allowed(endpoint):
    server = endpoint(lambda body, n: (*echo(body, n)[:2], 0.05))
    EndpointChat(server.url, "m", max_concurrency=3).complete([ask(str(i)) for i in range(12)], max_new_tokens=3)
    assert server.most == 3 and len(server.requests) == 12


def test_the_key_is_in_no_text_pickle_copy_or_log(endpoint, caplog, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = endpoint(echo)
    chat = EndpointChat(server.url, "m", KEY)
    with caplog.at_level(logging.DEBUG):
        chat.complete([ask("a")], max_new_tokens=3)
    assert KEY in server.keys[0] and KEY not in caplog.text
    assert KEY not in repr(chat) and KEY not in chat.name and KEY.encode() not in pickle.dumps(chat)
    for twin in (pickle.loads(pickle.dumps(chat)), copy.deepcopy(chat)):
        with pytest.raises(ValueError, match="set the environment variable OPENAI_API_KEY"):
            twin.complete([ask("a")], max_new_tokens=3)


def test_the_key_of_the_environment_is_used_where_none_is_given(endpoint, monkeypatch):
    server = endpoint(echo)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    chat = pickle.loads(pickle.dumps(EndpointChat(server.url, "m", api_key_variable="JUDGE_KEY")))
    chat.complete([ask("a")], max_new_tokens=3)
    monkeypatch.delenv("JUDGE_KEY")
    EndpointChat(server.url, "m", api_key_variable="JUDGE_KEY").complete([ask("a")], max_new_tokens=3)
    assert server.keys == [f"Bearer {KEY}", "Bearer none"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"base_url": ""}, "base_url is ''; it must be an address such as http://localhost:8000/v1"),
        ({"base_url": "localhost:8000"}, "base_url is 'localhost:8000'"),
        ({"base_url": f"http://me:{KEY}@localhost/v1"}, "give the key as api_key instead"),
        ({"model": ""}, "model is ''"),
        ({"max_concurrency": 0}, "max_concurrency is 0; it must be at least 1"),
        ({"max_retries": -1}, "max_retries is -1; it must be at least 0"),
        ({"timeout": 0}, "timeout is 0"),
    ],
)
def test_bad_arguments_of_an_endpoint_are_named(arguments, says):
    with pytest.raises(ValueError) as raised:
        EndpointChat(**{"base_url": "http://localhost/v1", "model": "m", **arguments})
    assert says in str(raised.value) and KEY not in str(raised.value)


@pytest.mark.parametrize(
    "conversations, arguments, says",
    [
        (["hello"], {}, "conversation 0 is 'hello'"),
        ([ask("a"), []], {}, r"conversation 1 is \[\]"),
        ([[{"role": "user"}]], {}, "a message is a mapping with role and content"),
        ([ask("a")], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([ask("a")], {"temperature": -1}, "temperature is -1"),
        ([ask("a")], {"top_p": 0}, "top_p is 0"),
        ([ask("a")], {"stop": "\n"}, "stop is '\\\\n'; it must be a list"),
    ],
)
def test_a_bad_call_is_refused_before_anything_is_sent(endpoint, conversations, arguments, says):
    server = endpoint(echo)
    with pytest.raises(ValueError, match=says):
        EndpointChat(server.url, "m").complete(conversations, **{"max_new_tokens": 3, **arguments})
    assert server.requests == []


@pytest.mark.slow
def test_without_the_client_the_extra_is_named_and_the_module_imports_nothing_heavy():
    code = (
        "import sys\nsys.modules['openai'] = None\nimport hf_ext.chat\n"
        "assert not {'torch', 'transformers', 'openai.types'} & set(sys.modules)\n"
        "try: hf_ext.chat.EndpointChat('http://localhost/v1', 'm')\n"
        "except ImportError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'hf-ext[endpoints]'" in out


# --- a model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(tiny_llama_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    tokenizer.chat_template = TEMPLATE
    return TransformersChat(tiny_llama_dir, tokenizer, batch_size=2)


def test_greedy_replies_are_those_of_generate_one_at_a_time_in_any_batch(chat):
    texts = ["a", "a much longer question", "mid length"]
    replies = chat.complete([ask(text) for text in texts], max_new_tokens=8)
    for text, reply in zip(texts, replies):
        ids = chat.tokenizer(f"<user>{text}<reply>", return_tensors="pt")
        written = chat.model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert reply.text == chat.tokenizer.decode(written, skip_special_tokens=True)
        assert reply.prompt_tokens == ids["input_ids"].shape[1]
        assert (reply.finish_reason, reply.completion_tokens) == ("length", 8)


def test_sampling_is_seeded_and_leaves_the_generator_of_others_alone(chat):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again, other = (
        chat.complete([ask("a")], max_new_tokens=8, temperature=1.0, seed=seed)[0].text for seed in (1, 1, 2)
    )
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


def sampled(chat, texts, seeds, batch_size=8, **sampling) -> list[str]:
    ids = [chat.tokenizer(text)["input_ids"] for text in texts]
    sampling = {"max_new_tokens": 8, "temperature": 1.0, **sampling}
    replies = generate_replies(chat.model, chat.tokenizer, ids, batch_size=batch_size, seed=seeds, **sampling)
    return [reply.text for reply in replies]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_with_a_seed_for_each_prompt_a_sample_depends_on_nothing_else(chat, top_p):
    texts, seeds = ["one", "two and more", "three"], [5, 6, 2**62 - 1]
    before = torch.get_rng_state()
    found = sampled(chat, texts, seeds, top_p=top_p)
    assert sampled(chat, texts[::-1], seeds[::-1], batch_size=2, top_p=top_p) == found[::-1]
    assert [sampled(chat, [text], [seed], top_p=top_p)[0] for text, seed in zip(texts, seeds)] == found
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(sampled(chat, ["one"] * 3, [1, 2, 1], top_p=top_p))) == 2


def test_samples_with_seeds_of_their_own_are_distributed_as_the_softmax(chat):
    prompt = chat.tokenizer("<user>a<reply>")["input_ids"]
    temperature, count = 0.02, 2000  # a random model is flat: cooled down, a few tokens share the mass
    with torch.no_grad():
        logits = chat.model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    expected = (logits / temperature).softmax(-1)
    generated = []
    generate = chat.model.generate
    chat.model.generate = lambda **inputs: generated.append(generate(**inputs)) or generated[-1]
    try:
        sampling = {"max_new_tokens": 1, "temperature": temperature, "batch_size": count}
        generate_replies(chat.model, chat.tokenizer, [prompt] * count, seed=list(range(count)), **sampling)
    finally:
        del chat.model.generate
    shares = torch.bincount(generated[0][:, -1], minlength=len(expected)).double() / count
    assert (expected > 0.05).sum() > 1
    # Four standard errors of a share of 0.5.
    torch.testing.assert_close(shares, expected, rtol=0, atol=4 * 0.5 / count**0.5)


def test_seeds_of_a_greedy_call_change_nothing_and_their_number_is_checked(chat):
    greedy = sampled(chat, ["a", "b"], 0, temperature=0.0)
    assert sampled(chat, ["a", "b"], [1, 2], temperature=0.0) == greedy
    with pytest.raises(ValueError, match="seed has 1 numbers for 2 prompts; give one for each, or one for all"):
        sampled(chat, ["a", "b"], [1])


def test_the_models_own_sampling_settings_and_mode_are_left_alone(chat):
    plain = chat.complete([ask("a")], max_new_tokens=8)
    settings = copy.deepcopy(chat.model.generation_config)
    chat.model.generation_config.update(repetition_penalty=5.0, do_sample=True, temperature=9.0, top_k=1)
    chat.model.train()
    try:
        assert chat.complete([ask("a")], max_new_tokens=8) == plain
        assert chat.model.training
    finally:
        chat.model.generation_config = settings
        chat.model.eval()


def test_a_reply_ends_at_the_end_token_and_at_a_stop_string(chat):
    prompt = chat.tokenizer("<user>a<reply>")["input_ids"]
    written = chat.model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)[
        0, len(prompt) :
    ].tolist()
    # A token that is a whole character and is not among those before it.
    place = next(i for i in range(2, 32) if 32 <= written[i] < 94 and written[i] not in written[:i])
    string = chat.tokenizer.decode(written[place : place + 1])
    expected = ChatReply(chat.tokenizer.decode(written[:place]), "stop", len(prompt), place + 1)
    replies = chat.complete([ask("a"), ask("bb")], max_new_tokens=32, stop=[string, "never written"])
    assert replies[0] == expected
    end = chat.model.generation_config.eos_token_id
    chat.model.generation_config.eos_token_id = [end, written[place]]
    try:
        (reply,) = generate_replies(chat.model, chat.tokenizer, [prompt], batch_size=1, max_new_tokens=32)
    finally:
        chat.model.generation_config.eos_token_id = end
    assert reply == expected


def test_a_prompt_that_does_not_fit_is_an_error_of_its_own(chat):
    long, good = chat.complete([ask("x" * 600), ask("a")], max_new_tokens=4)
    assert long.text is None and "more than the model's 512 positions" in long.error
    assert good.error is None and good.completion_tokens == 4


def test_a_tokenizer_without_a_template_is_refused_unless_plain_text_is_asked_for(tiny_llama_dir):
    with pytest.raises(ValueError, match="has no chat template.*plain_text=True"):
        TransformersChat(tiny_llama_dir)
    plain = TransformersChat(tiny_llama_dir, plain_text=True)
    messages = [{"role": "system", "content": "Be brief."}, *ask("Why?")]
    assert render_conversation(plain.tokenizer, messages, plain_text=True) == "Be brief.\n\nWhy?\n"
    assert plain.complete([messages], max_new_tokens=2)[0].completion_tokens == 2


def test_template_arguments_reach_the_template(chat):
    tokenizer = copy.deepcopy(chat.tokenizer)
    tokenizer.chat_template = "{{ 'slow' if thinking else 'quick' }}"
    assert render_conversation(tokenizer, ask("a"), template_kwargs={"thinking": True}) == "slow"
    assert render_conversation(tokenizer, ask("a")) == "quick"


def test_bad_arguments_of_a_model_are_named(chat, tiny_llama_dir):
    with pytest.raises(ValueError, match="batch_size is 0"):
        TransformersChat(tiny_llama_dir, batch_size=0)
    with pytest.raises(ValueError, match="dtype: for loading a model, but this one is loaded already"):
        TransformersChat(chat.model, chat.tokenizer, dtype="float32")
    assert chat.name == f"transformers:{tiny_llama_dir}" and str(tiny_llama_dir) in repr(chat)
