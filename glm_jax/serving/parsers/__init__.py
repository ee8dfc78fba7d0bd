"""From ids to the parts of an answer: text, reasoning, tool calls.

Everything here is incremental and says the same however the ids arrive: one
at a time, eight a step, or all at once. A complete answer is parsed by the
same code in one piece, so streams and complete answers cannot differ.
"""

from glm_jax.serving.parsers.chat import CallDelta, ChatDelta, ChatParser
from glm_jax.serving.parsers.detokenize import Detokenizer, Piece
from glm_jax.serving.parsers.stops import StopFilter

__all__ = [
  'CallDelta',
  'ChatDelta',
  'ChatParser',
  'Detokenizer',
  'Piece',
  'StopFilter',
]
