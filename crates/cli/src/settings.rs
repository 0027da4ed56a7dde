//! The settings of a command line: all given options folded in order, the last one winning.
//!
//! Called by [`crate::plan`] and the other planners. Pure. The effect of each option is in its row
//! ([`crate::options`]); checks that need all options are in [`Settings::fold`].

use crate::{
    cage::settings::CageSettings,
    option_value::{Given, Value},
    options::{Spelling, Taker},
};
use nacre_daemon::{
    failure::Failure,
    log::target::LogTarget,
    plan::{Atime, Door, Engine, Verbosity},
};
use nacre_stack::spec::{HostSpec, LayerSpec, RemapSpec, ThrottleSpec, TraceLevel, TraceSpec, XattrPolicy};
use std::path::PathBuf;

/// The settings of a command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The host directory; its source is filled in by the plan.
    pub host: HostSpec,
    /// Owners, modes, rules.
    pub remap: RemapSpec,
    /// Rates.
    pub throttle: ThrottleSpec,
    /// Limits.
    pub cage: CageSettings,
    /// The mount itself.
    pub door: Door,
    /// The engine that serves the mount.
    pub engine: Engine,
    /// `-f`.
    pub foreground: bool,
    /// `-d`.
    pub debug: bool,
    /// `--explain`.
    pub explain: bool,
    /// `-h`.
    pub help: bool,
    /// `-V`.
    pub version: bool,
    /// `--fuse-version`.
    pub fuse_version: bool,
    /// `-o remount`.
    pub remount: bool,
    /// `-o nonempty`.
    pub nonempty: bool,
    /// `--log`.
    pub log: Option<Verbosity>,
    /// `--log-target`, `--log-file`.
    pub log_target: Option<LogTarget>,
    /// `--daemon`.
    pub daemon: Option<String>,
    /// The named flags of the mount, as words, in the order given: a remount changes these.
    pub flags: Vec<&'static str>,
    /// The first given option of a layer, as it is written: `nacre mount` refuses it.
    pub layer_option: Option<&'static str>,
    /// The first given option that only a cage has.
    pub cage_option: Option<&'static str>,
    /// Warnings for standard error.
    pub warnings: Vec<String>,
    /// `--user`, `--owner`: weaker than `--force-user`.
    pub deprecated_user: Option<String>,
    /// `--group`: weaker than `--force-group`.
    pub deprecated_group: Option<String>,
    /// `-o uid=`: stronger than every option.
    pub shown_uid: Option<u32>,
    /// `-o gid=`: stronger than every option.
    pub shown_gid: Option<u32>,
    /// `-o umask=`: comes after the other rules on modes.
    pub umask: Option<u32>,
}

impl Settings {
    /// Folds the given options.
    ///
    /// # Errors
    /// A value that does not fit its option, or options that exclude each other.
    pub fn fold(given: &[Given]) -> Result<Settings, Failure> {
        let mut settings = Settings::default();
        given.iter().try_for_each(|option| settings.apply(option))?;
        settings.settle()?;
        Ok(settings)
    }

    fn apply(&mut self, given: &Given) -> Result<(), Failure> {
        let row = given.option.row();
        if !row.is_for(Taker::Stack) && self.layer_option.is_none() {
            self.layer_option = Some(row.name);
        }
        if row.spelling == Spelling::Cage && self.cage_option.is_none() {
            self.cage_option = Some(row.name);
        }
        (row.set)(self, Value { row, given: &given.value })
    }

    /// Returns the settings of the mount, and records that this flag was named.
    pub fn flag(&mut self, word: &'static str) -> &mut Door {
        self.flags.push(word);
        &mut self.door
    }

    /// Returns the owner of an option that has been renamed, and records a warning.
    ///
    /// # Errors
    /// The owner is empty.
    pub fn deprecated(&mut self, value: Value<'_>, instead: &str) -> Result<String, Failure> {
        let warning = format!("--{} is deprecated: write --{instead}", value.row.name);
        if !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
        value.owner()
    }

    /// Checks the options of the process.
    ///
    /// # Errors
    /// Foreground and a shared process exclude each other.
    pub fn check_process(&self) -> Result<(), Failure> {
        match &self.daemon {
            Some(_) if self.foreground => {
                Err(Failure::usage("--daemon=NAME serves in the background, -f and -d in the foreground")
                    .next("leave one of them out"))
            }
            _ => Ok(()),
        }
    }

    /// Checks and derives settings that need all options.
    fn settle(&mut self) -> Result<(), Failure> {
        self.check_process()?;
        let remap = &mut self.remap;
        remap.force_user = remap.force_user.take().or(self.deprecated_user.take());
        remap.force_group = remap.force_group.take().or(self.deprecated_group.take());
        if remap.mirror.is_some() && remap.mirror_only.is_some() {
            return Err(Failure::usage("--mirror and --mirror-only exclude each other"));
        }
        if let Some(uid) = self.shown_uid {
            if remap.mirror_only.is_some() {
                return Err(Failure::usage("-o uid= and --mirror-only exclude each other"));
            }
            remap.mirror = None;
            remap.force_user = Some(uid.to_string());
        }
        if let Some(gid) = self.shown_gid {
            remap.force_group = Some(gid.to_string());
        }
        if let Some(umask) = self.umask {
            let rule = format!("0{:03o}", 0o777 & !umask);
            remap.perms = Some(match remap.perms.take().filter(|perms| !perms.is_empty()) {
                Some(perms) => format!("{perms}:{rule}"),
                None => rule,
            });
        }
        if remap.xattr == XattrPolicy::None {
            self.door.xattr = false;
            self.door.acl = false;
        }
        Ok(())
    }

    /// Returns the layers from the bottom up. Rules are a layer even where none is given, so that
    /// they can be set later (`nacre reload`); other layers without effect are left out.
    pub fn layers(&self, source: PathBuf) -> Vec<LayerSpec> {
        let host = HostSpec { source, noatime: self.door.atime == Some(Atime::No), ..self.host.clone() };
        let mut layers = vec![LayerSpec::Host(host), LayerSpec::Remap(Box::new(self.remap.clone()))];
        if self.throttle != ThrottleSpec::default() {
            layers.push(LayerSpec::Throttle(self.throttle.clone()));
        }
        if self.debug {
            layers.push(LayerSpec::Trace(TraceSpec { level: TraceLevel::All }));
        }
        layers
    }

    /// Returns the verbosity of the log: the given one, everything with `-d`.
    pub fn verbosity(&self) -> Option<Verbosity> {
        self.log.or(self.debug.then_some(Verbosity::Debug))
    }
}
