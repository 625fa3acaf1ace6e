"""How well a model does on patients it has not seen: metrics, patient-level statistics, calibration and probes."""
