//! What the last process of a service left with its manager, for the one that goes on.
//!
//! Called by the command line first of all. Whatever is not gone on with is taken back from the manager, and the
//! service begins anew.

use super::{HANDOVER, PREFIX, remove, told};
use crate::{
    background, clock, failure::Failure, guardian::NEED_NO_END, handover::Handover, memory_file, report::tell,
};
use nacre_fuse::Survival;
use nacre_sys::descriptors;
use std::{fs::File, io, os::fd::IntoRawFd, time::Duration};

/// So long may processes before this one take until they are dead, and how often that is looked at.
const DYING: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(20);

/// What the service's last process left with the manager for this one, if it did: to be called before this
/// process opens anything.
///
/// # Errors
/// The last process serves still.
pub fn find() -> Option<Result<Handover, Failure>> {
    let given = sd_notify::listen_fds_with_names().ok()?;
    let ours = given.filter_map(|(number, name)| Some((number, name.strip_prefix(PREFIX)?.to_owned())));
    let ours: Vec<(i32, String)> = ours.collect();
    if ours.is_empty() {
        return None;
    }
    // For the numbers that the last process had.
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

/// Why nobody goes on with what the last process left.
enum WhyNot {
    /// This process serves still.
    ServesStill(u32),
    /// What is left is of no use.
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

/// Gives all of it its place.
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
    // Its descriptor here may have the number of one that is missing.
    drop(memory);
    let missing = needed.into_iter().chain(device).filter(|number| !descriptors::is_open(*number)).count();
    if missing > 0 {
        return Err(over(&format!("it lacks {missing} descriptors: FileDescriptorStoreMax= may be too small")));
    }
    // What else is noted would be taken for what this process opens next.
    for number in noted.into_iter().filter(|number| !descriptors::is_open(*number)) {
        let nothing = File::open("/dev/null")?.into_raw_fd();
        if nothing != number {
            descriptors::renumber(&[(nothing, number)])?;
        }
    }
    Ok(handover)
}
