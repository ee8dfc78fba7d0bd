"""A small byte-level BPE tokenizer in the published format of GLM-5.2.

Text is cut by the usual pattern of byte-level vocabularies, except that every
digit stands alone, and merges are learnt within the pieces. All 256 bytes are
in the vocabulary, so any text round-trips. GLM's control tokens and markup
come last, in their published order; ids of text never reach them: a document
that merely mentions <|user|> is encoded by `TextEncoder` as plain characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import tokenizers
from etils import epath
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT, MASK, START = '<|endoftext|>', '[gMASK]', '<sop>'
FILE = '<|file_sep|>'
# Hidden in decoded text. FILE, which heads a file with its path, is ours.
CONTROL_TOKENS = (
  END_OF_TEXT,
  '[MASK]',
  MASK,
  '[sMASK]',
  START,
  '<eop>',
  '<|system|>',
  '<|user|>',
  '<|assistant|>',
  '<|observation|>',
  '<|code_prefix|>',
  '<|code_middle|>',
  '<|code_suffix|>',
  FILE,
)
# Shown in decoded text: parsers look for it.
MARKUP_TOKENS = (
  '<think>',
  '</think>',
  '<tool_call>',
  '</tool_call>',
  '<tool_response>',
  '</tool_response>',
  '<arg_key>',
  '</arg_key>',
  '<arg_value>',
  '</arg_value>',
)
# Tokens that end a turn, as in the published configuration.
EOS_TOKENS = (END_OF_TEXT, '<|user|>', '<|observation|>')
TEMPLATE = epath.Path(__file__).parents[1] / 'chat_template.jinja'

_NUM_ADDED = len(CONTROL_TOKENS) + len(MARKUP_TOKENS)
_PIECES = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_LONGEST_TOKEN = 32


def train_tokenizer(
  texts: Iterable[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """Learns a vocabulary; the same texts give the same one.

  Args:
    texts: what to learn from.
    vocab_size: special tokens included; fewer if the texts have no more.

  Raises:
    ValueError: the vocabulary cannot hold the bytes and special tokens.
  """
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  if vocab_size < len(alphabet) + _NUM_ADDED:
    raise ValueError(
      f'{vocab_size=} must be at least {len(alphabet) + _NUM_ADDED}: '
      f'{len(alphabet)} bytes and {_NUM_ADDED} special tokens'
    )
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(_PIECES), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  backend.post_processor = processors.ByteLevel(trim_offsets=False)
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size - _NUM_ADDED,
    min_frequency=2,
    initial_alphabet=alphabet,
    max_token_length=_LONGEST_TOKEN,
    show_progress=False,
  )
  backend.train_from_iterator(texts, trainer)
  backend.add_special_tokens(list(CONTROL_TOKENS))
  # Not cut out of text by normalisation, nor hidden when decoded.
  backend.add_tokens(
    [tokenizers.AddedToken(t, normalized=False) for t in MARKUP_TOKENS]
  )
  return backend


def write_tokenizer(
  backend: tokenizers.Tokenizer,
  directory: epath.PathLike,
  *,
  max_length: int = 1 << 20,
):
  """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja.

  Args:
    backend: from `train_tokenizer`.
    directory: made if it does not exist; local or remote.
    max_length: of the model's context, for libraries that ask.
  """
  directory = epath.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  added = {
    str(i): {
      'content': token.content,
      'lstrip': False,
      'normalized': False,
      'rstrip': False,
      'single_word': False,
      'special': token.special,
    }
    for i, token in sorted(backend.get_added_tokens_decoder().items())
  }
  config = {
    'added_tokens_decoder': added,
    'additional_special_tokens': list(CONTROL_TOKENS),
    'clean_up_tokenization_spaces': False,
    'eos_token': END_OF_TEXT,
    'model_max_length': max_length,
    'pad_token': END_OF_TEXT,
    'padding_side': 'left',
    'tokenizer_class': 'PreTrainedTokenizerFast',
  }
  (directory / TEMPLATE.name).write_bytes(TEMPLATE.read_bytes())
  text = json.dumps(config, indent=2, ensure_ascii=False) + '\n'
  (directory / 'tokenizer_config.json').write_bytes(text.encode())
  text = backend.to_str(pretty=False) + '\n'
  (directory / 'tokenizer.json').write_bytes(text.encode())


class TextEncoder:
  """Encodes documents: control tokens around text, never out of it.

  Attributes:
    vocab_size: ids the tokenizer knows, special tokens included.
  """

  def __init__(self, tokenizer_json: epath.PathLike):
    """Reads a tokenizer.json that has the control tokens used here."""
    text = epath.Path(tokenizer_json).read_bytes().decode('utf-8')
    try:
      content = json.loads(text)
      whole = tokenizers.Tokenizer.from_str(text)
      # Without added tokens nothing in a text is taken for one.
      content['added_tokens'] = []
      content['post_processor'] = None
      self._plain = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # The library raises bare Exception.
      raise ValueError(
        f'{tokenizer_json} is no byte-level tokenizer.json: {error}'
      ) from error
    self.vocab_size = whole.get_vocab_size(with_added_tokens=True)
    names = (MASK, START, FILE, END_OF_TEXT)
    ids = [whole.token_to_id(name) for name in names]
    if None in ids:
      missing = [n for n, i in zip(names, ids) if i is None]
      raise ValueError(f'{tokenizer_json} lacks {", ".join(missing)}')
    self._mask, self._start, self._file, self._end = ids

  def encode_documents(
    self, documents: Sequence[Sequence[tuple[str, str]]]
  ) -> list[list[int]]:
    """Ids of documents, each a sequence of (path, text).

    A document is [gMASK]<sop>, then <|file_sep|>, path, line end and text of
    each file, then <|endoftext|>. Uses all cores.
    """
    texts = [f'{path}\n{text}' for files in documents for path, text in files]
    encoded = iter(self._plain.encode_batch_fast(texts))
    result = []
    for files in documents:
      ids = [self._mask, self._start]
      for _ in files:
        ids.append(self._file)
        ids += next(encoded).ids
      result.append([*ids, self._end])
    return result
