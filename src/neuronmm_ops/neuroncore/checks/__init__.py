"""Rules of the NKI API and the hardware: one function and one error text each.

Every error names the instruction, the operand, the rule, the values seen and the remedy, on one
line.
"""

from neuronmm_ops.neuroncore.checks.base import *  # noqa: F403
from neuronmm_ops.neuroncore.checks.dma import *  # noqa: F403
from neuronmm_ops.neuroncore.checks.elementwise import *  # noqa: F403
from neuronmm_ops.neuroncore.checks.language import *  # noqa: F403
from neuronmm_ops.neuroncore.checks.operands import *  # noqa: F403
from neuronmm_ops.neuroncore.checks.reductions import *  # noqa: F403
from neuronmm_ops.neuroncore.checks.selections import *  # noqa: F403
from neuronmm_ops.neuroncore.checks.tensor_engine import *  # noqa: F403
from neuronmm_ops.neuroncore.checks.tensors import *  # noqa: F403
from neuronmm_ops.neuroncore.checks.views import *  # noqa: F403
