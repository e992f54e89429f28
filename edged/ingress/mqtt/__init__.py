"""MQTT: requests and answers through a broker (MQTT 5 and 3.1.1)."""

from __future__ import annotations

from edged.ingress.mqtt.ingress import MqttIngress

__all__ = ["MqttIngress"]
