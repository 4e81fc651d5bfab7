"""Train an agent of stable-baselines3 on a real training job, and see what it would choose.

python examples/own_agent.py
"""

import gymnasium
import torch
from stable_baselines3 import PPO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autotune


def make_job() -> autotune.Job:
    torch.manual_seed(0)
    inputs = torch.randn(1024, 32)
    loader = DataLoader(TensorDataset(inputs, inputs.cumsum(1).tanh()), batch_size=128, shuffle=True)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(4)))
    return autotune.Job.from_loader(model, loader, nn.MSELoss(), torch.optim.AdamW(model.parameters(), lr=1e-3))


def main() -> None:
    # A step of the environment trains the job for a few steps under the plan that the action names.
    env = gymnasium.make("autotune/Tuning-v0", job=make_job(), memory_budget_bytes="80%", window_steps=4, max_windows=4)
    agent = PPO("MultiInputPolicy", env, n_steps=16, batch_size=16, seed=0)
    agent.learn(32)

    observation, _ = env.reset(seed=1)
    action, _ = agent.predict(observation, deterministic=True)
    _, reward, _, _, info = env.step(action)
    print(f"reward {reward:.2f}: {info['failure'] or 'fits'}, {info['peak_bytes']} bytes")
    env.close()


if __name__ == "__main__":
    main()
