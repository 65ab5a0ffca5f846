"""Post-training core: maths, models, rollouts and stages. Knows nothing of Prefect, MLflow or Great Expectations."""
