"""Maths with arguments that several architectures share: linear, norm, rotary positions, embedding."""
