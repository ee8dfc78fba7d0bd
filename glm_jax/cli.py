"""Command line conventions that every launcher shares: flags, exits, output.

A launcher defines absl flags and a `main` without arguments, and ends with
`cli.run(main)`. Exit codes are answers: 0, the thing asked for is true; 1, it
is not; 2, the input was bad, and one line on stderr says why. A traceback
means a bug. Results go to stdout; `log` and `progress` write to stderr.

absl knows one spelling of a flag, so the command line is first rewritten into
`--name=value`: dashes count as underscores, and `--no-x`, `--no_x`, `--nox`
switch a boolean off. `absl.app.run` is not used: it exits with 1 on a bad flag,
prints several lines, and turns on info logging of every library.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import difflib
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import tqdm
from absl import app, flags
from etils import epath

from glm_jax.embedded import EMBEDDED

_TRACEBACK = flags.DEFINE_bool(
  'traceback', False, 'With an error, show where in the code it was raised.'
)

_PACKAGES = ('glm_jax', 'pallas_kernels', 'sharding', 'launch')
_HELP = ('help', 'helpshort', 'helpfull', 'h', '?')
_URL_SCHEMES = ('gs', 's3', 'az', 'hf')
_HUB_ID = re.compile(r'\w[\w.-]*/\w[\w.-]*')
# What a user's mistake looks like when library code meets it.
_BAD_INPUT = (
  ValueError,
  NotImplementedError,
  FileNotFoundError,
  FileExistsError,
  IsADirectoryError,
  NotADirectoryError,
  PermissionError,
  app.UsageError,
  flags.Error,
)


class UserError(ValueError):
  """Bad input; `run` prints the message as one line and exits with 2."""


class HelpRequest(Exception):
  """The command line asks for help; carries whether for every flag."""

  def __init__(self, every_flag: bool):
    super().__init__('help')
    self.every_flag = every_flag


def run(
  main: Callable[[], bool | int | None], argv: Sequence[str] | None = None
) -> NoReturn:
  """Parses the command line, calls `main` and exits with its answer.

  Args:
    main: takes nothing and reads its flags; returns None, True or 0 when the
      thing asked for is true, False or 1 when it is not.
    argv: the program and its arguments; None is sys.argv.

  Raises:
    SystemExit: always; 130 after an interrupt, else as the module says.
    Exception: what `main` raised, if it is no sign of bad input.
  """
  argv = list(sys.argv if argv is None else argv)
  program = os.path.basename(argv[0])
  try:
    parse_flags(argv)
    code = _exit_code(main())
    sys.stdout.flush()
  except HelpRequest as request:
    print(_help(main, every_flag=request.every_flag))
    code = 0
  except KeyboardInterrupt:
    log(f'{program}: interrupted')
    code = 130
  except (*_BAD_INPUT, ImportError) as error:
    if isinstance(error, ImportError) and not _is_missing_extra(error):
      raise
    if flags.FLAGS['traceback'].value:
      traceback.print_exc()
    log(f'{program}: {_one_line(error)}')
    code = 2
  sys.exit(code)


def parse_flags(
  argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS
):
  """Parses `argv` (program first) in any accepted spelling.

  Raises:
    HelpRequest: help was asked for, whatever else is on the command line.
    UserError: an unknown flag, a bad or missing value, a stray argument.
  """
  program, *rest = argv
  try:
    # Expands --flagfile=FILE; its lines may use any spelling too.
    rest = flag_values.read_flags_from_files(rest, force_gnu=True)
    flag_values([program, *_canonical(rest, flag_values)])
  except UserError:
    raise
  except (flags.Error, ValueError) as error:
    raise UserError(_one_line(error)) from error


def log(*parts: Any):
  """Prints a line on stderr, above any progress bar."""
  tqdm.tqdm.write(' '.join(map(str, parts)), file=sys.stderr)
  sys.stderr.flush()


def progress(
  iterable: Iterable | int | None = None,
  desc: str | None = None,
  *,
  total: int | None = None,
  unit: str = 'it',
) -> tqdm.tqdm:
  """A progress bar on stderr; silent where stderr is not a terminal.

  Args:
    iterable: what to iterate over, or a number of steps, as `total`.
    desc: what is going on.
    total: steps to come, for `.update()` or an iterable without a length.
    unit: what a step is.
  """
  if isinstance(iterable, int):
    iterable, total = None, iterable
  return tqdm.tqdm(
    iterable,
    desc=desc,
    total=total,
    unit=unit,
    file=sys.stderr,
    dynamic_ncols=True,
    disable=not sys.stderr.isatty(),
  )


def write_json(path: epath.PathLike, obj: Any):
  """Writes `obj` as JSON, making parent folders; all of the file or nothing.

  Arrays become lists, dataclasses objects; NaN and infinities become null,
  since JSON has neither.

  Raises:
    TypeError: `obj` holds something that JSON cannot express.
  """
  text = json.dumps(_jsonable(obj), indent=2, allow_nan=False) + '\n'
  path = epath.Path(path).expanduser()
  path.parent.mkdir(parents=True, exist_ok=True)
  name = os.fspath(path)
  device = os.path.exists(name) and not os.path.isfile(name)
  if device or '://' in name:  # A remote object is written at once.
    path.write_text(text)
    return
  partial = path.parent / f'.{path.name}.{os.getpid()}.tmp'
  try:
    partial.write_text(text)
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)


def origin() -> dict[str, str]:
  """What a reader of a result needs to get it again; touches no device."""
  versions = {}
  for package in ('jax', 'libtpu'):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  program = 'launch/' + os.path.basename(sys.argv[0])
  today = datetime.datetime.now(datetime.UTC).date().isoformat()
  command = shlex.join(['python', program, *sys.argv[1:]])
  return {'command': command, 'date': today, **versions}


def machine() -> str:
  """The device that jax computes on, in words."""
  import jax

  device = jax.devices()[0]
  if device.platform == 'cpu':
    return f'{os.cpu_count()}-core CPU ({platform.machine()})'
  return device.device_kind


def some_of(
  flag: str, wanted: Sequence[str] | None, known: Iterable[str]
) -> list[str]:
  """The names that a list flag asks for; all that there are without it.

  Raises:
    UserError: a name that is not known.
  """
  known = list(known)
  for name in wanted or ():
    if name not in known:
      raise UserError(f'--{flag}={name} must be some of {known}')
  return list(wanted or known)


def resolve_model_path(name: str | None, *, presets: Iterable[str] = ()) -> str:
  """Checks a `--model` value: something here, a URL or a preset name.

  Args:
    name: what the user wrote; ~ is expanded. None, or 'glm_nano' where there
      is nothing of that name, is the embedded model.
    presets: names that `load_config` knows; dashes count as underscores.

  Returns:
    An existing path, the URL as it stands, or the preset's name.

  Raises:
    UserError: none of these; for a hub id it holds the download command.
  """
  if name is None:
    return os.fspath(EMBEDDED)
  presets = {preset.replace('-', '_'): preset for preset in presets}
  scheme, is_url, _ = name.partition('://')
  if is_url:
    if scheme not in _URL_SCHEMES:
      known = ', '.join(f'{s}://' for s in _URL_SCHEMES)
      raise UserError(f'cannot read {name}: use a local path or {known}')
    return name
  path = epath.Path(name).expanduser()
  if name and path.exists():
    return os.fspath(path)
  if name.replace('-', '_') in presets:
    return presets[name.replace('-', '_')]
  if name.replace('-', '_') == EMBEDDED.name:
    return os.fspath(EMBEDDED)
  hub_id = name.rstrip('/')
  if _HUB_ID.fullmatch(hub_id) and path.suffix not in ('.py', '.json'):
    folder = hub_id.split('/')[1]
    raise UserError(
      f'{hub_id} is not a directory here; if it is a hub id, download it: '
      f'hf download {hub_id} --local-dir {folder}, then use {folder}'
    )
  hint = f'; presets: {", ".join(sorted(presets.values()))}' if presets else ''
  raise UserError(f'no such directory or file: {name!r}{hint}')


def _canonical(args: Sequence[str], flag_values: flags.FlagValues) -> list[str]:
  """Every argument as --name=value; a wish for help outranks any problem."""
  result, strays, problems, help_names = [], [], [], []
  rest = collections.deque(args)
  while rest:
    arg = rest.popleft()
    if arg == '--':
      strays += rest
      break
    if arg == '-' or not arg.startswith('-'):
      strays.append(arg)
      continue
    name, has_value, value = _split(arg)
    flag, negated = _find(name, flag_values)
    if flag is None and name in _HELP:
      help_names.append(name)
    elif flag is None:
      problems.append(_unknown(arg, name, flag_values))
    elif negated and has_value:
      problems.append(f'{arg}: a negated flag takes no value')
    elif flag.boolean and not has_value:
      result.append(f'--{flag.name}={"false" if negated else "true"}')
    elif has_value:
      result.append(f'--{flag.name}={value}')
    elif not rest or _is_flag(rest[0], flag_values):
      problems.append(f'flag --{flag.name} needs a value: --{flag.name}=VALUE')
    else:
      result.append(f'--{flag.name}={rest.popleft()}')
  if help_names:
    raise HelpRequest(every_flag='helpfull' in help_names)
  if strays and not problems:  # Else they may be a bad flag's value.
    problems.append(
      f'unexpected argument {", ".join(map(repr, strays))}: write '
      '--flag=value, and booleans as --flag or --no-flag'
    )
  if problems:
    raise UserError('; '.join(problems))
  return result


def _split(arg: str) -> tuple[str, bool, str]:
  """(name, has a value, value) of an argument that starts with a dash."""
  name, equals, value = arg[2 if arg.startswith('--') else 1 :].partition('=')
  return name, bool(equals), value


def _find(
  name: str, flag_values: flags.FlagValues
) -> tuple[flags.Flag | None, bool]:
  """The flag meant by `name`, if any, and whether it is switched off."""
  for spelling in (name, name.replace('-', '_')):
    if spelling in flag_values:
      return flag_values[spelling], False
    positive = spelling.removeprefix('no').removeprefix('_')
    if spelling.startswith('no') and positive in flag_values:
      if flag_values[positive].boolean:
        return flag_values[positive], True
  return None, False


def _is_flag(arg: str, flag_values: flags.FlagValues) -> bool:
  name = _split(arg)[0]
  known = name in _HELP or _find(name, flag_values)[0] is not None
  return arg.startswith('--') and known


def _unknown(arg: str, name: str, flag_values: flags.FlagValues) -> str:
  names = [flag.name for flag in _own_flags(flag_values)]
  names += [f'no_{f.name}' for f in _own_flags(flag_values) if f.boolean]
  close = difflib.get_close_matches(name.replace('-', '_'), names)
  hint = ' or '.join(f'--{match}' for match in close)
  hint = f'did you mean {hint}?' if close else '--help lists the flags'
  return f'unknown flag {arg.split("=")[0]}; {hint}'


def _own_flags(
  flag_values: flags.FlagValues, main_module: str = '__main__'
) -> list[flags.Flag]:
  """Flags of the program, then of our packages; not those of libraries."""
  # absl files the flags of __main__ under the path of the program.
  module = sys.argv[0] if main_module == '__main__' else main_module
  found = list(flag_values.get_key_flags_for_module(module))
  for name, defined in flag_values.flags_by_module_dict().items():
    if name.split('.')[0] in _PACKAGES:
      found += defined
  return list({flag.name: flag for flag in found}.values())


def _help(main: Callable, every_flag: bool) -> str:
  module = main.__module__
  lines = [(sys.modules[module].__doc__ or '').strip(), '', 'Flags:']
  shown = _own_flags(flags.FLAGS, module)
  if every_flag:
    shown = [flags.FLAGS[name] for name in sorted(flags.FLAGS)]
  for flag in shown:
    name = f'--[no_]{flag.name}' if flag.boolean else f'--{flag.name}'
    default = str(flag.default).lower() if flag.boolean else flag.default
    default = '' if flag.default is None else f' (default: {default})'
    about = ' '.join((flag.help or '').split()) + default
    indent = ' ' * 6
    lines.append(f'  {name}')
    lines += textwrap.wrap(
      about, 80, initial_indent=indent, subsequent_indent=indent
    )
  return '\n'.join(lines).lstrip()


def _exit_code(answer: Any) -> int:
  """0 for true, 1 for false; anything else is a bug of the launcher."""
  if hasattr(answer, 'item'):  # A boolean of NumPy or JAX.
    answer = answer.item()
  if answer is None or isinstance(answer, bool):
    return int(answer is False)
  if answer in (0, 1):
    return int(answer)
  raise TypeError(f'main returned {answer!r}; expected None, a bool, 0 or 1')


def _is_missing_extra(error: ImportError) -> bool:
  """A package that is not installed, as opposed to a bug in ours."""
  return (error.name or '').split('.')[0] not in _PACKAGES


def _one_line(error: BaseException) -> str:
  text = str(error)
  if isinstance(error, OSError) and error.strerror and error.filename:
    text = f'{error.strerror}: {error.filename}'
  lines = [line.strip() for line in text.splitlines()]
  return ' '.join(filter(None, lines)) or type(error).__name__


def _jsonable(obj: Any) -> Any:
  """The same in types that JSON has; non-finite numbers become None."""
  if obj is None or isinstance(obj, bool | int | str):
    return obj
  if isinstance(obj, float):
    return float(obj) if math.isfinite(obj) else None
  if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
    fields = dataclasses.fields(obj)
    return {f.name: _jsonable(getattr(obj, f.name)) for f in fields}
  if isinstance(obj, Mapping):
    return {str(key): _jsonable(value) for key, value in obj.items()}
  if isinstance(obj, list | tuple):
    return [_jsonable(item) for item in obj]
  if isinstance(obj, os.PathLike):
    return os.fspath(obj)
  if hasattr(obj, 'tolist'):  # Arrays and scalars of NumPy and JAX.
    return _jsonable(obj.tolist())
  raise TypeError(f'{type(obj).__name__} cannot be written as JSON: {obj!r}')
