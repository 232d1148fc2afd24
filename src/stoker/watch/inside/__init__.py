"""Instrumentation inside a training process: the way in (boot), torch hooked (hooks), the rest (probe).

Standard library only, so that it works in any environment torch works in; a failure here switches a part off
and never stops the program.
"""
