//! Carries out the commands of cages: creates them with the chosen engine, changes, shows and
//! removes them.

use super::{
    command::CageVerb,
    plan::{self, CagePlan},
    status,
};
use crate::output;
use nacre_daemon::{
    background,
    cage::{
        change,
        engine::{EngineKind, Wanted},
        engines::{self, engine_of},
        find, place,
        record::CageRecord,
        resize, state, writers,
    },
    failure::{Exit, Failure},
    mountinfo, opening,
    plan::Engine,
    report::path_text,
    serve, unmount,
};
use nacre_layers::size::{LimitRule, Size};
use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
};

/// Creates a cage.
///
/// # Errors
/// The reason why it cannot be created; nothing has changed then.
pub fn make(plan: &CagePlan) -> Result<ExitCode, Failure> {
    if background::is_background() {
        return serve::run(&plan.mount, background::reason(), true).map(|()| ExitCode::SUCCESS);
    }
    let program = plan.mount.program.as_str();
    plan.mount.warnings.iter().for_each(|warning| tell(program, warning));
    state::sweep();
    let image = known_image(plan)?;
    if plan.settings.size.is_none() && plan.engine != Engine::Loop && image.is_none() {
        return Err(plan::no_size());
    }
    unmount::clear(&plan.mount.mountpoint, &plan.mount)?;
    if serve::is_there(&plan.mount)? {
        return Ok(ExitCode::SUCCESS);
    }
    let wanted = wanted(plan)?;
    let (engine, reason) = choose(plan, &wanted, image.as_ref());
    place::apart(&wanted.directory, wanted.place())?;
    if engine == EngineKind::Fuse {
        place::uncaged(&wanted.directory, &find::known()?, &mountinfo::read()?)?;
    }
    if plan.mount.explain {
        return explain(plan, &wanted, engine, &reason);
    }
    if plan.engine == Engine::Auto || image.is_some() {
        tell(program, &format!("engine {engine}: {reason}"));
    }
    serve::notices(&plan.mount).iter().for_each(|notice| tell(program, notice));
    larger_than_disk(&wanted.directory, wanted.bytes).iter().for_each(|notice| tell(program, notice));
    larger_than_cage(&plan.settings.limits, wanted.bytes).iter().for_each(|notice| tell(program, notice));
    if wanted.mountpoint.is_none() && engine != EngineKind::Quota {
        writers::warnings(&wanted.directory).iter().for_each(|warning| tell(program, warning));
    }
    match engines::engine(engine) {
        Some(engine) => engine.create(&wanted, &mut |line| tell(program, line)).map(|_| ExitCode::SUCCESS),
        None if plan.mount.foreground => serve::run(&plan.mount, reason, false).map(|()| ExitCode::SUCCESS),
        None => background::in_background(&reason),
    }
}

/// Returns a warning for a limit that exceeds the size of the directory's file system.
pub fn larger_than_disk(directory: &Path, limit: Option<u64>) -> Option<String> {
    let figures = rustix::fs::statvfs(directory).ok()?;
    let (limit, whole) = (limit?, figures.f_blocks.saturating_mul(figures.f_frsize));
    let (size, most) = (Size::new(limit).short(), Size::new(whole).short());
    // Some file systems have no size.
    (whole > 0 && limit > whole).then(|| {
        format!(
            "{size} is more than the file system of {} can hold ({most}): it is full before the cage is",
            path_text(directory)
        )
    })
}

/// Returns warnings for limits of users and directories that exceed the limit of the cage.
fn larger_than_cage(limits: &[String], whole: Option<u64>) -> Vec<String> {
    let Some(whole) = whole else { return Vec::new() };
    let larger = limits.iter().filter(|text| {
        let Ok(LimitRule::User(_, size) | LimitRule::Directory(_, size)) = text.parse::<LimitRule>() else {
            return false;
        };
        size.bytes() > whole
    });
    larger
        .map(|text| {
            format!("{text} is more than the cage holds ({}): it is full before that", Size::new(whole).short())
        })
        .collect()
}

/// Resolves the paths of the plan.
fn wanted(plan: &CagePlan) -> Result<Wanted, Failure> {
    let directory = place::directory(&plan.directory)?;
    let mountpoint = match &plan.mountpoint {
        Some(named) => Some(opening::target(named)?).filter(|mountpoint| *mountpoint != directory),
        None => None,
    };
    Ok(Wanted {
        directory,
        mountpoint,
        bytes: plan.settings.size.map(|size| size.limit().unwrap_or_else(|_| size.bytes())),
        inodes: plan.settings.inodes,
        image: plan.settings.image.clone().map(|image| std::path::absolute(&image).unwrap_or(image)),
        fstype: plan.settings.fstype,
        sparse: plan.settings.sparse,
        fuse_only: plan.fuse_only.clone(),
    })
}

/// The image that this cage was created with before, where no engine was asked for: its mount point
/// is empty now, and another cage in it would not be what the user means.
fn known_image(plan: &CagePlan) -> Result<Option<CageRecord>, Failure> {
    if !plan.engine_by_default && plan.engine != Engine::Auto {
        return Ok(None);
    }
    let record = find::record(&plan.directory)?.filter(|record| record.engine == EngineKind::Loop);
    let elsewhere = |mountpoint: &Path| std::path::absolute(mountpoint).unwrap_or_else(|_| mountpoint.to_owned());
    Ok(record.filter(|record| {
        plan.mountpoint.as_deref().is_none_or(|mountpoint| elsewhere(mountpoint) == record.mountpoint)
    }))
}

fn choose(plan: &CagePlan, wanted: &Wanted, image: Option<&CageRecord>) -> (EngineKind, String) {
    let asked = |engine: EngineKind| (engine, format!("--engine={engine}"));
    if let Some(path) = image.and_then(CageRecord::image) {
        return (EngineKind::Loop, format!("this cage is in the image {}", path_text(path)));
    }
    match plan.engine {
        Engine::Auto => (EngineKind::Fuse, engines::why_not_quota(wanted, rustix::process::geteuid().is_root())),
        Engine::Loop => asked(EngineKind::Loop),
        Engine::Quota => asked(EngineKind::Quota),
        Engine::Fuse | Engine::Kernel => (EngineKind::Fuse, "--engine=fuse, the default".to_owned()),
    }
}

fn explain(plan: &CagePlan, wanted: &Wanted, engine: EngineKind, reason: &str) -> Result<ExitCode, Failure> {
    let text = match engine {
        EngineKind::Fuse => serve::explain_as(&plan.mount, reason)?,
        other => {
            wanted.only_limits(other)?;
            format!(
                "directory   {}\nmountpoint  {}\nengine      {other} ({reason})\n",
                path_text(&wanted.directory),
                path_text(wanted.place())
            )
        }
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a line to standard error; a failure to write it is ignored.
fn tell(program: &str, line: &str) {
    let _ = writeln!(io::stderr(), "{program}: {line}");
}

/// Carries out a command on existing cages.
///
/// # Errors
/// No such cage, or the error of its engine.
pub fn run(verb: &CageVerb) -> Result<(), Failure> {
    state::sweep();
    match verb {
        CageVerb::Resize { directory, size, inodes } => {
            resize::run(directory, *size, *inodes)?.iter().for_each(|line| tell("nacre", line));
            let limit = if let Some(change::SizeChange::To(bytes)) = size { Some(*bytes) } else { None };
            // A mounted cage answers statfs with its own limit: its parent directory is asked
            // instead.
            let place = std::path::absolute(directory).unwrap_or_else(|_| directory.clone());
            larger_than_disk(place.parent().unwrap_or(&place), limit).iter().for_each(|line| tell("nacre", line));
            Ok(())
        }
        CageVerb::Status { view, directories } => output::print(&status::status(view, directories)?),
        CageVerb::List { view } => output::print(&status::list(view)?),
        CageVerb::Remove { directory, yes } => remove(directory, *yes),
    }
}

fn remove(directory: &Path, yes: bool) -> Result<(), Failure> {
    let Some(record) = find::record(directory)? else {
        if find::named(&find::all(&nacre_daemon::control::whose(&[directory.to_owned()]))?, directory).is_ok() {
            let text = path_text(directory);
            return Err(Failure::new(format!("{text} is a cage of the engine fuse: there is nothing to remove"))
                .next(format!("`nacre umount {text}` ends it")));
        }
        return Err(find::missing(directory));
    };
    if record.engine == EngineKind::Loop && !yes {
        let image = record.image().map(path_text).unwrap_or_default();
        return Err(Failure::usage(format!("this deletes the image {image} with everything that is in the cage"))
            .next("--yes does it; `nacre umount` only unmounts it")
            .exit(Exit::Usage));
    }
    let engine = engine_of(&record)?;
    engine.destroy(&record, &mut |line| tell("nacre", line))
}
