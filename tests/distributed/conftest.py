"""Makes the functions that ranks run importable by name in the spawned processes."""

import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)  # tiny tensors on few cores: more threads only wait for each other
MODULES = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "lies")]
sys.path[:0] = [folder for folder in MODULES if folder not in sys.path]
os.environ["PYTHONPATH"] = os.pathsep.join([*MODULES, *filter(None, [os.environ.get("PYTHONPATH")])])
