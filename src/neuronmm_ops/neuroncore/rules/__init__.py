"""Rules of the NKI API and the hardware: one function and one error text each.

Every error names the instruction, the operand, the rule, the values seen and the remedy, on one
line.
"""

from neuronmm_ops.neuroncore.rules.base import *  # noqa: F403
from neuronmm_ops.neuroncore.rules.dma import *  # noqa: F403
from neuronmm_ops.neuroncore.rules.elementwise import *  # noqa: F403
from neuronmm_ops.neuroncore.rules.language import *  # noqa: F403
from neuronmm_ops.neuroncore.rules.operands import *  # noqa: F403
from neuronmm_ops.neuroncore.rules.reductions import *  # noqa: F403
from neuronmm_ops.neuroncore.rules.selections import *  # noqa: F403
from neuronmm_ops.neuroncore.rules.tensor_engine import *  # noqa: F403
from neuronmm_ops.neuroncore.rules.tensors import *  # noqa: F403
from neuronmm_ops.neuroncore.rules.views import *  # noqa: F403
