//! What users are told of an unmount that the system refused.

use crate::failure::{Exit, Failure};

/// An unmount that the system refused.
pub fn refused(mountpoint: &str, error: &std::io::Error) -> Failure {
    let mut failure = Failure::io("cannot unmount", mountpoint, error);
    let told = crate::failure::reason(error);
    if told.starts_with("cannot unmount") {
        failure.what = told;
    }
    match failure.exit {
        Exit::Busy => failure
            .next(format!("somebody uses it; `fuser -vm {mountpoint}` says who, `nacre umount --lazy {mountpoint}` detaches it at once")),
        _ => failure,
    }
}
