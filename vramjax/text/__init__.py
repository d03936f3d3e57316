"""Text in and out of a model: tokenizers, chat templates, and text that is shown as it comes."""

from vramjax.text.chat import ChatTemplate
from vramjax.text.stream import StreamDecoder
from vramjax.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "StreamDecoder", "Tokenizer"]
