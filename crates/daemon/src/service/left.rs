//! Finds the handoff state that the last process of a service stored with its manager.
//!
//! Called by the command line first of all. State that cannot be taken over is removed from the manager, and the
//! service starts without it.

use super::{HANDOVER, PREFIX, remove, told};
use crate::{
    background, clock, failure::Failure, guardian::NEED_NO_END, handover::Handover, memory_file, report::tell,
};
use nacre_fuse::Survival;
use nacre_sys::descriptors;
use std::{fs::File, io, os::fd::IntoRawFd, time::Duration};

/// Deadline for the death of previous processes, and interval of polling.
const DYING: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(20);

/// Returns the handoff state that the service's last process stored for this one, if any: to be called before this
/// process opens anything.
///
/// # Errors
/// The last process still serves.
pub fn find() -> Option<Result<Handover, Failure>> {
    let given = sd_notify::listen_fds_with_names().ok()?;
    let ours = given.filter_map(|(number, name)| Some((number, name.strip_prefix(PREFIX)?.to_owned())));
    let ours: Vec<(i32, String)> = ours.collect();
    if ours.is_empty() {
        return None;
    }
    // Raises the limit of descriptors to that of the last process.
    background::settle();
    match take(&ours) {
        Ok(handover) => Some(Ok(handover)),
        Err(WhyNot::ServesStill(process)) => {
            let what = format!("process {process} of this service serves still");
            Some(Err(Failure::new(what).next("KillMode=mixed in the unit has it ended with the service")))
        }
        Err(WhyNot::Over(why)) => {
            tell(&format!(
                "nacre: what the last process of this service left is not gone on with, it begins anew: {why}"
            ));
            told(ours.iter().try_for_each(|(_, name)| remove(name)));
            told(descriptors::close_all_from_but(3, &[]));
            None
        }
    }
}

/// Reason why there is no takeover.
enum WhyNot {
    /// The previous process (its id) still serves.
    ServesStill(u32),
    /// The state is unusable.
    Over(String),
}

impl From<io::Error> for WhyNot {
    fn from(error: io::Error) -> WhyNot {
        WhyNot::Over(error.to_string())
    }
}

impl From<Failure> for WhyNot {
    fn from(failure: Failure) -> WhyNot {
        WhyNot::Over(failure.what)
    }
}

fn over(why: &str) -> WhyNot {
    WhyNot::Over(why.to_owned())
}

/// Takes over all descriptors under their recorded numbers.
fn take(ours: &[(i32, String)]) -> Result<Handover, WhyNot> {
    let (text, numbered): (Vec<_>, Vec<_>) = ours.iter().partition(|(_, name)| name == HANDOVER);
    let (number, _) = text.first().ok_or_else(|| over("no handover is among it"))?;
    let text = descriptors::take_over(*number).and_then(|file| memory_file::read(&file.into()))?;
    let pairs = numbered.iter().filter_map(|(from, name)| Some((*from, name.parse().ok().filter(|to| *to > 2)?)));
    descriptors::renumber(&pairs.collect::<Vec<(i32, i32)>>())?;
    let handover = Handover::read(&text)?;
    let memory = descriptors::another(handover.memory).and_then(Survival::taken_over);
    let memory = memory.map_err(|error| over(&format!("its memory cannot be read: {error}")))?;
    if memory.has_ended() || !memory.can_resume() {
        return Err(over(&memory.why_not().unwrap_or_else(|| "it had ended".to_owned())));
    }
    let worker = memory.worker().ok_or_else(|| over("nobody had served yet"))?;
    let dead = clock::look_until(DYING, LOOK, || worker.runs(&NEED_NO_END).is_ok_and(|runs| !runs));
    if !dead {
        return Err(WhyNot::ServesStill(worker.number));
    }
    memory.lost_open_files();
    let needed = handover.served.needed(&memory)?;
    let noted = handover.served.noted(&memory)?;
    let device = memory.device();
    // Its descriptor here may have the number of a missing one.
    drop(memory);
    let missing = needed.into_iter().chain(device).filter(|number| !descriptors::is_open(*number)).count();
    if missing > 0 {
        return Err(over(&format!("it lacks {missing} descriptors: FileDescriptorStoreMax= may be too small")));
    }
    // Other recorded numbers are occupied: they would be taken for files that this process opens next.
    for number in noted.into_iter().filter(|number| !descriptors::is_open(*number)) {
        let nothing = File::open("/dev/null")?.into_raw_fd();
        if nothing != number {
            descriptors::renumber(&[(nothing, number)])?;
        }
    }
    Ok(handover)
}
