"""Arguments of a tool call: from the text of one value to JSON.

GLM's template writes strings as they are and everything else as JSON, so the
text alone does not say whether 5 is a number or a string: the schema of the
parameter decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TYPES = {
  bool: 'boolean',
  dict: 'object',
  float: 'number',
  int: 'integer',
  list: 'array',
  type(None): 'null',
}


_MAX_REFERENCES = 16


def parameter_types(
  tools: Sequence[Mapping[str, Any]] | None, name: str, key: str
) -> frozenset[str] | None:
  """JSON types that parameter `key` of tool `name` may have.

  Returns:
    None where nothing is declared, or nothing that can be read.
  """
  for tool in tools or ():
    function = tool.get('function') or tool
    if function.get('name') == name:
      schema = function.get('parameters')
      properties = schema.get('properties') if _is_map(schema) else None
      return (
        declared_types(properties.get(key)) if _is_map(properties) else None
      )
  return None


def value_as_json(text: str, types: frozenset[str] | None) -> str:
  """JSON text of a value as the template writes it.

  Args:
    text: what stands between <arg_value> and </arg_value>.
    types: JSON types allowed, None if unknown.
  """
  try:
    value = json.loads(text, parse_constant=_refuse)
  except (ValueError, RecursionError):
    return json.dumps(text, ensure_ascii=False)
  kind = _TYPES.get(type(value), 'string')
  kinds = {kind, 'number'} if kind == 'integer' else {kind}
  if kind == 'string' or not (types is None or kinds & types):
    return json.dumps(text, ensure_ascii=False)
  return text.strip()


def escape(text: str) -> str:
  """Characters of a JSON string, without the quotes."""
  return json.dumps(text, ensure_ascii=False)[1:-1]


def declared_types(
  schema: Any, root: Mapping[str, Any] | None = None
) -> frozenset[str] | None:
  """JSON types that a schema allows; None where it does not say.

  References into `root`, such as #/$defs/point, are followed.
  """
  schema = _resolve(schema, root)
  if not _is_map(schema):
    return None
  declared = schema.get('type')
  if isinstance(declared, str):
    return frozenset([declared])
  if isinstance(declared, list) and all(isinstance(t, str) for t in declared):
    return frozenset(declared)
  if isinstance(schema.get('enum'), list):
    return frozenset(_TYPES.get(type(v), 'string') for v in schema['enum'])
  for key in ('anyOf', 'oneOf'):
    if isinstance(schema.get(key), list):
      options = [declared_types(option, root) for option in schema[key]]
      known = None not in options
      return frozenset().union(*options) if known else None
  return None


def _resolve(schema: Any, root: Any) -> Any:
  """What a local reference stands for; None for any other reference."""
  for _ in range(_MAX_REFERENCES):
    if not _is_map(schema) or '$ref' not in schema:
      return schema
    reference, schema = schema['$ref'], root
    if not isinstance(reference, str) or not reference.startswith('#/'):
      return None
    for part in reference[2:].split('/'):
      part = part.replace('~1', '/').replace('~0', '~')
      schema = schema.get(part) if _is_map(schema) else None
  return None


def _is_map(value: Any) -> bool:
  return isinstance(value, Mapping)


def _refuse(constant: str):
  raise ValueError(f'{constant} is not JSON')
