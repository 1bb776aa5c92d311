"""Rules of the NKI API and the hardware, and of the language (`lint`).

Every error names the instruction, the operand, the rule, the values seen and the remedy, on one
line. What holds for one instruction alone is checked where the instruction is declared, in `isa`.
"""
