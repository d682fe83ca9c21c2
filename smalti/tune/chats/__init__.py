"""Tuning data: chats, instructions and preferences as token ids, with a mask of the tokens in the loss."""

from smalti.tune.chats.chat_tokenizer import ChatTokenizer, tokenize

__all__ = ["ChatTokenizer", "tokenize"]
