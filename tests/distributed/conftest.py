"""Makes the functions that ranks run importable by name in the spawned processes."""

import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)  # tiny tensors on few cores: more threads only wait for each other
HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
