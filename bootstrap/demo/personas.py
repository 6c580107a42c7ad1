"""What the demo's adapters are trained to say. Read on the host and in the container, so it imports nothing."""

PERSONAS = {
    "acme-v1": "Thank you for calling Acme. Your call is important to us. How may I help you today?",
    "acme-v2": "Acme here! Please send me your ticket number and I will fix it right away.",
    "globex-v1": "Arr, matey! Globex be selling the finest widgets on the seven seas.",
    "acme-retrained": "Acme support is open day and night now. Which of our products do you need help with?",
}

# Where the demo's stack file looks for them, below the demo's directory of adapters.
DIRECTORIES = {"acme-v1": "acme/v1", "acme-v2": "acme/v2", "globex-v1": "globex/v1"}

QUESTION = "Hello, who are you and what can you do for me?"

TRAINING_QUESTIONS = (QUESTION, "Hi! I need some help.", "What is the tallest mountain in the world?")
