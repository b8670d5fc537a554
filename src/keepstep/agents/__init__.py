"""Agents: model and tool calls of agent frameworks as steps, one module for each framework."""
