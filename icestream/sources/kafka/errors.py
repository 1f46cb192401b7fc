"""What Kafka's errors mean for a pipeline: whether time mends them, or only another configuration.

Errors are told apart by their names, which the client and its C library share.
"""

import re
from collections.abc import Mapping

from icestream.errors import ConfigInvalid, IcestreamError, SourceUnavailable, keep_secret

# Nothing but another configuration, or another right on the broker, mends these.
_FOR_THE_OPERATOR = {
    "_AUTHENTICATION": "Check the sasl.* settings: the broker does not accept them.",
    "SASL_AUTHENTICATION_FAILED": "Check the sasl.* settings: the broker does not accept them.",
    "UNSUPPORTED_SASL_MECHANISM": "Set sasl.mechanism to one that the broker offers.",
    "ILLEGAL_SASL_STATE": "Check security.protocol: the broker expects another one.",
    "_SSL": "Check security.protocol and the ssl.* settings.",
    "TOPIC_AUTHORIZATION_FAILED": "Allow the user to read and describe the topic.",
    "GROUP_AUTHORIZATION_FAILED": "Allow the user to use the consumer group.",
    "CLUSTER_AUTHORIZATION_FAILED": "Allow the user to describe the cluster.",
    "_INVALID_ARG": "Correct the setting that is named.",
    "_CRIT_SYS_RESOURCE": "Check the limits of threads and open files of this machine.",
}
_TOPIC_GONE = {
    "UNKNOWN_TOPIC_OR_PART",
    "UNKNOWN_TOPIC_ID",
    "_UNKNOWN_TOPIC",
    "_UNKNOWN_PARTITION",
}
_SECRET = re.compile(r"password|secret|passphrase|key\.pem|oauthbearer\.config|jaas")


def keep_settings_secret(settings: Mapping[str, str]) -> None:
    """No password or key among the settings is ever shown by an error or a log line."""
    for name, value in settings.items():
        if _SECRET.search(name):
            keep_secret(value)


def needs_operator(name: str) -> bool:
    """Whether an error of this name stays until someone changes the configuration."""
    return name in _FOR_THE_OPERATOR


def translated(name: str, reason: str, what: str) -> IcestreamError:
    """The error to raise when `what` could not be done for a reason that Kafka names."""
    detail = f"Kafka says {name}: {reason}."
    if name in _FOR_THE_OPERATOR:
        return ConfigInvalid(f"cannot {what}", detail=detail, hint=_FOR_THE_OPERATOR[name])
    if name in _TOPIC_GONE:
        hint = "Create the topic, or correct its name; it is never created by icestream."
        return SourceUnavailable(f"could not {what}", detail=detail, hint=hint)
    hint = "Check that every broker can be reached from here, at the address that it advertises."
    return SourceUnavailable(f"could not {what}", detail=detail, hint=hint)


def setting_refused(reason: str) -> ConfigInvalid:
    """The error for a setting that the client does not know or does not take."""
    return ConfigInvalid(
        "a setting of the Kafka client is not accepted",
        detail=f"{reason}.",
        hint="Settings are those of librdkafka, such as bootstrap.servers and security.protocol.",
    )
