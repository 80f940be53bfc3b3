"""The one error of the growth tools: it says which option, tensor or file, what was found and what would be valid."""


class GrowthError(ValueError):
    """Growth was refused, or its receipt missed the tolerance; nothing was left at the target's name."""


class ReceiptError(GrowthError):
    """The grown checkpoint was measured and differs by more than was declared (`receipt` holds what was measured)."""

    def __init__(self, message: str, receipt: dict):
        super().__init__(message)
        self.receipt = receipt
