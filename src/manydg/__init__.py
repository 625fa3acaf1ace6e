"""Models trained on many patients that keep working on patients they have never seen."""
