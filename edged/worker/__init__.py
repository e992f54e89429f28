"""The worker process: one step loop over an executor; `python -m edged.worker` starts it.

Open loop.py first. plan.py and slots.py decide, executor.py is the seam to the device.
"""
