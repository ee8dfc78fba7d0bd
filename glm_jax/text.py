"""Text in and out: tokenizer, chat template, stop strings, streaming.

A prompt becomes text through a Jinja template, text becomes ids through the
`tokenizers` library, and new ids become text piece by piece. Templates come
with checkpoints, so they are untrusted code: they run in an immutable Jinja
sandbox, which reaches neither Python attributes nor files.

`TextStream` keeps a window of ids, never the whole history. Byte-level text is
settled up to its last, possibly unfinished character, and the state of a UTF-8
decoder depends on the last three bytes only, so old ids can be forgotten.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np
import tokenizers
from etils import epath

_ROLES = ('system', 'user', 'assistant', 'tool')
_ROLE_ALIASES = {'developer': 'system', 'observation': 'tool'}
_INSTEAD_OF_CONTENT = ('tool_calls', 'reasoning_content', 'reasoning')
# Ids of a stream's window before it is cut, and after: more than the three
# that an unfinished UTF-8 character can span.
_WINDOW_IDS, _KEPT_IDS = 24, 8
_BROKEN = '\ufffd'


class Tokenizer:
  """Ids and text of one checkpoint, with its chat template.

  Attributes:
    stop_ids: ids that end a generation, ascending; every one of them stops.
    vocab_size: ids the tokenizer knows, added tokens included. The model's
      `vocab_size` may be larger (padded); such ids decode to nothing.
    template_source: where the chat template was read, for messages.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    template: str | None = None,
    template_source: str = 'given',
    eos_token_ids: Iterable[int] = (),
  ):
    """Wraps a loaded tokenizer; `load` is the usual way in.

    Without a template, the one shipped with glm-jax serves.
    """
    # A prompt must never be cut without a word.
    backend.no_truncation()
    backend.no_padding()
    self._backend = backend
    self._special_ids = frozenset(
      i for i, t in backend.get_added_tokens_decoder().items() if t.special
    )
    if template is None:
      path = epath.Path(__file__).parent / 'chat_template.jinja'
      template, template_source = _read(path), 'of glm-jax'
    self.template_source = template_source
    self._template = _compile(template, template_source)
    self.stop_ids = tuple(sorted({int(i) for i in eos_token_ids}))
    self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

  @classmethod
  def load(
    cls,
    directory: epath.PathLike,
    *,
    eos_token_ids: Iterable[int] = (),
  ) -> Tokenizer | None:
    """Reads `tokenizer.json` and the chat template of a checkpoint directory.

    The template is `chat_template.jinja`, else `chat_template` of
    tokenizer_config.json, else the one shipped with glm-jax. The tokenizer
    class named in tokenizer_config.json is not consulted.

    Args:
      directory: local or remote (gs://).
      eos_token_ids: ids that end a generation, beside those that
        `read_eos_token_ids` finds in the directory.

    Returns:
      None where there is no tokenizer.json: ids still work, text is null.

    Raises:
      ValueError: a file is there and cannot be used; names the file.
    """
    directory = epath.Path(directory)
    path = directory / 'tokenizer.json'
    if not path.exists():
      return None
    try:
      backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # The library raises bare Exception.
      raise ValueError(f'{path} is broken: {error}; fetch it again') from error
    template, source = _find_template(directory)
    eos = (*eos_token_ids, *read_eos_token_ids(directory))
    return cls(backend, template, source, eos)

  def encode(self, text: str) -> list[int]:
    """Ids of `text`; special tokens inside it are recognised, none is added.

    Raises:
      ValueError: `text` is not a string of valid Unicode.
    """
    try:
      # The batch call, unlike `encode`, lets other threads run meanwhile.
      batch = self._backend.encode_batch_fast([text], add_special_tokens=False)
      return batch[0].ids
    except TypeError as error:
      raise ValueError(
        f'cannot encode {text!r:.80}: give a str without lone surrogates'
      ) from error

  def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Text of `ids` [n], n >= 0; unknown ids give nothing, broken UTF-8 U+FFFD.

    Raises:
      ValueError: `ids` are not integers in [0, 2^32).
    """
    return self._backend.decode(_as_list(ids), skip_special_tokens)

  def to_json(self) -> str:
    """The tokenizer in the format of tokenizer.json."""
    return self._backend.to_str()

  def visible_ids(
    self, ids: Sequence[int], skip_special_tokens: bool = True
  ) -> list[int]:
    """Those of `ids` that `decode` does not leave out."""
    hidden = self._special_ids if skip_special_tokens else ()
    known = self._backend.id_to_token
    return [i for i in _as_list(ids) if i not in hidden and known(i)]

  def apply_chat_template(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    enable_thinking: bool = True,
    reasoning_effort: str | None = None,
    clear_thinking: bool | None = None,
    **kwargs: Any,
  ) -> str:
    """Renders a conversation as the text that the model continues.

    Args:
      messages: OpenAI-style turns; content is a string or text parts. Role
        'developer' counts as 'system', 'observation' as 'tool'; the arguments
        of a call may be JSON text.
      tools: function descriptions; their order decides the cached prefix.
      add_generation_prompt: end with the opening of an assistant turn.
      enable_thinking: False gives an empty think block and no effort line.
      reasoning_effort: exactly 'high' lowers the effort; all else is Max.
      clear_thinking: drop the reasoning before the last user turn. None is
        the template's default; the shipped one keeps it, and so the prefix.
      **kwargs: further template variables (`chat_template_kwargs`).

    Raises:
      ValueError: a bad message, or a template that fails.
    """
    if isinstance(messages, str | Mapping) or not messages:
      raise ValueError(f'{messages=} must be a non-empty list of messages')
    messages = [_check_message(i, m) for i, m in enumerate(messages)]
    # A template tells an unset variable from one that is None.
    if reasoning_effort is not None:
      kwargs['reasoning_effort'] = reasoning_effort
    if clear_thinking is not None:
      kwargs['clear_thinking'] = clear_thinking
    try:
      return self._template.render(
        kwargs,
        messages=messages,
        tools=list(tools) if tools else None,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
      )
    except Exception as error:  # Template code may raise anything.
      raise ValueError(
        f'the chat template {self.template_source} failed: {error}; correct '
        'the request or the template'
      ) from error


class TextStream:
  """Turns ids into text as they arrive; the pieces joined equal `decode`.

  A piece never ends inside a character: what may still be completed waits for
  the next ids. Work per id does not grow with the stream.
  """

  def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
    self._tokenizer = tokenizer
    self._skip_special_tokens = skip_special_tokens
    self._window: list[int] = []
    self._given = 0  # Characters of the window's text already handed out.

  def feed(self, ids: int | Sequence[int]) -> str:
    """Adds one id or ids [n]; returns the text that is now complete."""
    self._window += self._tokenizer.visible_ids(ids, self._skip_special_tokens)
    text = self._tokenizer.decode(self._window, skip_special_tokens=False)
    end = len(text) - text.endswith(_BROKEN)
    piece, self._given = text[self._given : end], max(self._given, end)
    if len(self._window) > _WINDOW_IDS:
      self._forget(text)
    return piece

  def finish(self) -> str:
    """Returns what was held back (a broken last character is U+FFFD)."""
    text = self._tokenizer.decode(self._window, skip_special_tokens=False)
    piece = text[self._given :]
    self._window, self._given = [], 0
    return piece

  def _forget(self, text: str):
    """Cuts the window, perhaps inside a character: its rest reads as broken."""
    kept = self._window[-_KEPT_IDS:]
    tail = self._tokenizer.decode(kept, skip_special_tokens=False)
    if text.endswith(tail.lstrip(_BROKEN)):
      self._given += len(tail) - len(text)
      self._window = kept


def find_stop(text: str, stops: Iterable[str], start: int = 0) -> int | None:
  """Index in `text` where the earliest of `stops` begins, None without one.

  The search begins at index `start`: a stream need not search twice.

  Raises:
    ValueError: a stop string is empty, which would stop at once.
  """
  found = [text.find(stop, start) for stop in _nonempty(stops)]
  return min((index for index in found if index >= 0), default=None)


def partial_stop(text: str, stops: Iterable[str]) -> int:
  """Characters at the end of `text` that may be the start of a stop string.

  A stream holds these back until more text settles the matter.
  """
  stops = _nonempty(stops)
  longest = max(map(len, stops), default=0)
  for size in range(min(longest, len(text)), 0, -1):
    if any(len(s) > size and s.startswith(text[-size:]) for s in stops):
      return size
  return 0


def read_eos_token_ids(directory: epath.PathLike) -> tuple[int, ...]:
  """Union of `eos_token_id` in config.json and generation_config.json.

  Returns:
    Ascending ids; empty where neither file names one.

  Raises:
    ValueError: a value that is no id and no list of ids.
  """
  ids = set()
  for name in ('config.json', 'generation_config.json'):
    path = epath.Path(directory) / name
    value = _read_json(path).get('eos_token_id')
    listed = value if isinstance(value, list) else [value]
    listed = [] if value is None else listed
    if not all(type(i) is int and i >= 0 for i in listed):
      raise ValueError(
        f'eos_token_id of {path} is {value!r}; expected an id or a list of ids'
      )
    ids.update(listed)
  return tuple(sorted(ids))


def _check_message(index: int, message: Any) -> dict:
  """A checked copy: canonical role, content not None, arguments as dicts.

  Templates skip what they do not know: a misspelt role would lose a turn
  without a word. So it is refused here, whoever wrote the template.
  """
  message = message if isinstance(message, Mapping) else {'role': message}
  role, content = message.get('role'), message.get('content')
  role = _ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
  where = f'messages[{index}] ({role})'
  if role not in _ROLES:
    raise ValueError(f'{where:.120} has no known role; use one of {_ROLES}')
  if role == 'assistant' and any(message.get(k) for k in _INSTEAD_OF_CONTENT):
    content = '' if content is None else content
  if content is None:
    raise ValueError(
      f'{where} has no content; give a string or text parts (only an '
      'assistant turn with tool_calls or reasoning may leave it out)'
    )
  if not isinstance(content, str):
    for part in content if isinstance(content, list | tuple) else [content]:
      text = part.get('text') if isinstance(part, Mapping) else None
      if not isinstance(text, str) or part.get('type') != 'text':
        raise ValueError(
          f'{where} has content {part!r:.80}; only text is supported: a '
          "string, or a list of {'type': 'text', 'text': ...}"
        )
  calls = [_check_call(where, call) for call in message.get('tool_calls') or ()]
  called = {'tool_calls': calls} if calls else {}
  return {**message, 'role': role, 'content': content, **called}


def _check_call(where: str, call: Any) -> dict:
  """A tool call with its arguments as a dict; OpenAI sends them as JSON."""
  wrapped = isinstance(call, Mapping) and 'function' in call
  called = call['function'] if wrapped else call
  try:
    arguments = called.get('arguments') or {}
    if isinstance(arguments, str):
      arguments = json.loads(arguments)
    function = {'name': called['name'], 'arguments': {**arguments}}
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'{where} has the tool call {call!r:.80}; expected '
      "{'function': {'name': ..., 'arguments': a JSON object}}"
    ) from error
  return {**call, 'function': function} if wrapped else function


def _find_template(directory: epath.Path) -> tuple[str | None, str]:
  """(text, where it stands); the text is None where there is no template."""
  path = directory / 'chat_template.jinja'
  if path.exists():
    return _read(path), f'in {path}'
  path = directory / 'tokenizer_config.json'
  template = _read_json(path).get('chat_template')
  if isinstance(template, list):
    named = {t['name']: t['template'] for t in template if 'template' in t}
    template = named.get('default', template)
  if not isinstance(template, str | None):
    raise ValueError(
      f'chat_template in {path} is {template!r:.80}; expected a string or a '
      "list with {'name': 'default', 'template': ...}"
    )
  return template, f'in {path}'


def _compile(template: str, source: str) -> jinja2.Template:
  """Compiles in the sandbox, with the helpers that published templates use."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=['jinja2.ext.loopcontrols'],
  )
  # Jinja's own filter escapes HTML and sorts keys; models saw neither.
  to_json = functools.partial(json.dumps, ensure_ascii=False)
  environment.filters['tojson'] = to_json
  environment.globals['raise_exception'] = _raise_exception
  try:
    return environment.from_string(template)
  except jinja2.TemplateSyntaxError as error:
    raise ValueError(
      f'the chat template {source} is broken at line {error.lineno}: '
      f'{error.message}; correct it, or put a chat_template.jinja beside it'
    ) from error


def _raise_exception(message: str):
  raise jinja2.TemplateError(message)


def _as_list(ids: int | Sequence[int]) -> list[int]:
  """Checked Python ints of one id or of ids [n], NumPy and JAX included."""
  array = np.asarray(ids)
  if array.size == 0:
    return []
  integers = array.ndim <= 1 and array.dtype.kind in 'iu'
  if not integers or array.min() < 0 or array.max() >= 2**32:
    raise ValueError(f'ids {ids!r:.80} must be a list of ints in [0, 2^32)')
  return np.atleast_1d(array).tolist()


def _nonempty(stops: Iterable[str]) -> list[str]:
  stops = [stops] if isinstance(stops, str) else list(stops)
  if not all(stops):
    raise ValueError(f'{stops=} holds an empty stop string; leave it out')
  return stops


def _read(path: epath.Path) -> str:
  return path.read_bytes().decode('utf-8')


def _read_json(path: epath.Path) -> dict:
  """The object in a JSON file; {} where there is no file."""
  if not path.exists():
    return {}
  try:
    value = json.loads(_read(path))
  except ValueError as error:
    raise ValueError(f'{path} is not JSON: {error}') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path} holds {value!r:.80}, expected an object')
  return value
