"""Where the trained small model is that ships with the package.

`load_model()` and every launcher without `--model` take it; its model card
is the README in there.
"""

from etils import epath

NAME = 'glm_nano'
EMBEDDED = epath.Path(__file__).parent / 'models' / NAME
