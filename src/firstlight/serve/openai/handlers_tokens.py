"""POST /tokenize and /detokenize, with and without /v1: what the model's tokenizer makes of a text, and back.

Invariant: the tokens of a conversation are those a chat request would run with.
"""

from __future__ import annotations

from firstlight.base.errors import RequestError
from firstlight.serve.openai import replies
from firstlight.serve.openai.chat_turn import chat_prompt
from firstlight.serve.openai.prompts import check_ids, tokenize
from firstlight.serve.openai.requests import DetokenizeRequest, TokenizeRequest
from firstlight.serve.server import Server


async def tokens_of(server: Server, request: TokenizeRequest) -> replies.Tokens:
    """The tokens of a prompt or of a conversation."""
    server.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("Send either prompt or messages.", param="prompt")
    if request.messages is not None:
        ids = (await chat_prompt(server, request, request.messages)).token_ids
    else:
        assert request.prompt is not None
        (ids,) = await tokenize(server, [request.prompt], request.add_special_tokens)
    texts = [server.text.token_text(token) for token in ids] if request.return_token_strs else None
    return replies.Tokens(len(ids), server.ready.max_model_len, ids, texts)


def text_of(server: Server, request: DetokenizeRequest) -> replies.Text:
    """The text of tokens."""
    server.check_model(request.model)
    check_ids(server, [request.tokens], "tokens")
    return replies.Text(server.text.decode(request.tokens, skip_special_tokens=request.skip_special_tokens))
