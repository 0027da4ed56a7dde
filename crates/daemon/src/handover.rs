//! State that a supervisor hands over to another program which takes over its mount or pool (upgrade).
//!
//! Used by [`crate::guardian`] and [`crate::serving`], which hand it over, and by [`crate::upgrade`], which has the
//! other program check it first ([`crate::asked`]). Invariant: it has a version number of its format; a program
//! that does not know this version takes nothing over.

use crate::{
    asked,
    failure::Failure,
    handed_over::HandedOver,
    left::{Guarded, Left},
    pool::{left::PoolLeft, start::Start},
    report::path_text,
    shared::wire::MountRequest,
};
use nacre_fuse::{SURVIVAL_VERSION, Survival};
use serde::{Deserialize, Serialize};
use std::{ffi::OsString, fs, path::Path, sync::Arc};

/// Environment variable of a program that takes over: its [`Handover`].
const NAME: &str = "NACRE_GOES_ON";

/// A mount or pool that survives the process that serves it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Survivor {
    /// A mount with its plan.
    Mount(Box<MountRequest>),
    /// A pool with its mounts.
    Pool(Box<Start>),
}

/// State that a supervisor hands over to the program that it becomes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Handover {
    /// Process id, which stays the same.
    process: u32,
    /// Number of the descriptor of [`Survival`].
    pub memory: i32,
    /// Whether the mount or pool is served in the background.
    pub background: bool,
    /// The mount or pool.
    pub served: Survivor,
    /// Number of the descriptor of the previous program.
    #[serde(default)]
    pub before: Option<i32>,
}

impl Handover {
    /// Returns the supervisor's state for a program that takes over.
    pub fn of(memory: &Survival, background: bool, served: &Survivor) -> Handover {
        let (process, memory) = (std::process::id(), memory.descriptor());
        Handover { process, memory, background, served: served.clone(), before: None }
    }

    /// Returns the state as text.
    ///
    /// # Errors
    /// It cannot be serialized.
    pub fn text(&self) -> Result<Arc<str>, Failure> {
        serde_json::to_string(self)
            .map(Arc::from)
            .map_err(|error| Failure::new(format!("what is served cannot be noted: {error}")))
    }

    /// Returns the state with the program that the next one can go back to.
    #[must_use]
    pub fn from(&self, before: Option<i32>) -> Handover {
        Handover { before, ..self.clone() }
    }

    /// Parses the text.
    ///
    /// # Errors
    /// It is not understood.
    pub fn read(text: &[u8]) -> Result<Handover, Failure> {
        serde_json::from_slice(text).map_err(|error| Failure::new(format!("what was left is not understood: {error}")))
    }
}

/// Returns the state that another program needs to take over from this process, whose worker has recorded `left`.
pub fn hand_over(guarded: &Guarded, left: Vec<u8>) -> HandedOver {
    HandedOver { version: SURVIVAL_VERSION, handover: guarded.handover.to_string(), left }
}

/// Checks that this program can take over with this state.
///
/// # Errors
/// The reason why not.
pub fn check(handed: &HandedOver) -> Result<(), Failure> {
    if handed.version != SURVIVAL_VERSION {
        let (its, ours) = (handed.version, SURVIVAL_VERSION);
        return Err(Failure::new(format!("what it notes has version {its}, and this program reads version {ours}")));
    }
    match Handover::read(handed.handover.as_bytes())?.served {
        Survivor::Mount(mount) => {
            mount.plan()?;
            Left::read(&handed.left)?.spec().map(drop)
        }
        Survivor::Pool(_) => PoolLeft::read(&handed.left).map(drop),
    }
}

/// Returns the state that a supervisor handed over to this program, if it became this process.
///
/// # Errors
/// It is not understood.
pub fn left() -> Option<Result<Handover, Failure>> {
    let text = std::env::var(NAME).ok()?;
    // Programs started from here inherit the text, too, and have another process id.
    Some(Handover::read(text.as_bytes()))
        .filter(|left| left.as_ref().map_or(true, |left| left.process == std::process::id()))
}

/// Returns the environment of a program that a supervisor becomes.
pub fn settings(handover: &str) -> Vec<OsString> {
    let setting = |name: OsString, value: OsString| {
        let mut text = name;
        text.push("=");
        text.push(value);
        text
    };
    // Descriptors that a service manager passed to this process do not have the same numbers there.
    let given = |name: &OsString| name.as_encoded_bytes().starts_with(b"LISTEN_");
    let kept = std::env::vars_os().filter(|(name, _)| name != NAME && !given(name));
    kept.chain([(NAME.into(), handover.into())]).map(|(name, value)| setting(name, value)).collect()
}

/// Records which program is to take over from this process, which has recorded `left` itself.
///
/// # Errors
/// No takeover is possible, `program` is no program, or it cannot take over with this state.
pub fn note(guarded: &Guarded, left: Vec<u8>, program: &Path) -> Result<(), Failure> {
    if let Some(why) = guarded.memory.why_not() {
        return Err(Failure::new(format!("no program can go on with it: {why}")));
    }
    let is_program = program.is_absolute() && fs::metadata(program).is_ok_and(|file| file.is_file());
    let no_program = || Failure::new(format!("{} is no program that could go on", path_text(program)));
    if !is_program {
        return Err(no_program());
    }
    asked::ask(program, &hand_over(guarded, left))?;
    if !guarded.memory.set_program(program) {
        return Err(no_program());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        left::{Directories, Notes},
        plan::StackSource,
    };
    use nacre_stack::spec::StackSpec;
    use std::path::PathBuf;

    fn handed() -> HandedOver {
        let spec = StackSpec::from_line(b"host:/source | cage:size=1G,writes=through").unwrap();
        let plan = crate::plan::MountPlan {
            program: "nacre".to_owned(),
            stack: StackSource::Spec(spec.clone()),
            mountpoint: PathBuf::from("/at"),
            prefix: crate::plan::CAGE_PREFIX,
            door: crate::plan::Door::default(),
            engine: crate::plan::Engine::Fuse,
            foreground: false,
            explain: false,
            verbosity: None,
            log_target: None,
            daemon: None,
            nonempty: false,
            warnings: Vec::new(),
        };
        let resolved =
            crate::plan::Resolved { spec: spec.clone(), mountpoint: plan.mountpoint.clone(), log_target: None };
        let mount = MountRequest::new(&plan, resolved, "why").unwrap();
        let memory = Survival::new().unwrap();
        let handover = Handover::of(&memory, true, &Survivor::Mount(Box::new(mount))).text().unwrap();
        let guarded = Guarded { memory: memory.clone(), guardian: 1, handover, service: None };
        let notes = Notes::of(&guarded).unwrap();
        notes.begin(Path::new("/at"), "cage:/source", (&spec, &Directories::default()));
        let left = memory.text().unwrap();
        hand_over(&guarded, left)
    }

    #[test]
    fn what_another_version_notes_is_not_gone_on_with() {
        assert_eq!(check(&handed()), Ok(()));
        let wrong = [
            HandedOver { version: SURVIVAL_VERSION + 1, ..handed() },
            HandedOver { handover: handed().handover.replace("\"memory\"", "\"memories\""), ..handed() },
            HandedOver { handover: handed().handover.replace("cage:size", "cage:volume"), ..handed() },
            HandedOver { left: b"{}".to_vec(), ..handed() },
        ];
        for handed in wrong {
            assert!(check(&handed).is_err(), "{handed:?}");
        }
    }
}
