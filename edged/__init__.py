"""edged: a dependable text-generation appliance on Ascend NPU dev kits."""

__version__ = "0.1.0"
