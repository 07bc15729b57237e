"""The SGLang plugin, against SGLang's own classes and with the real engine on a CPU."""
