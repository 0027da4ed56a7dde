//! The commands of cages, as part of the table in [`crate::commands`]. Pure: arguments in, verbs
//! out.

use super::plan;
use crate::{
    clap_args::{self, View},
    options::Taker,
    plan::Asked,
    settings::Settings,
};
use clap::{Arg, ArgAction, ArgMatches, Command};
use nacre_daemon::{
    cage::change::{InodeChange, SizeChange},
    failure::Failure,
};
use std::{ffi::OsString, path::PathBuf};

/// A verb on existing cages.
#[derive(Debug, PartialEq, Eq)]
pub enum CageVerb {
    /// Change the limit.
    Resize {
        /// Directory of the cage.
        directory: PathBuf,
        /// The new size.
        size: Option<SizeChange>,
        /// The new number of inodes.
        inodes: Option<InodeChange>,
    },
    /// Show some cages, or all.
    Status {
        /// Columns and format.
        view: View,
        /// Directories of the cages; empty: all.
        directories: Vec<PathBuf>,
    },
    /// Show all cages in a table.
    List {
        /// Columns and format.
        view: View,
    },
    /// Remove a cage of a kernel engine.
    Remove {
        /// Directory of the cage.
        directory: PathBuf,
        /// The content is deleted, too.
        yes: bool,
    },
}

/// The command line of `nacre cage`.
pub fn command() -> Command {
    let engine = "What enforces the limit: fuse (the default: everywhere, without root), loop (an image with a file system of its own), quota (project quotas \
                  or Btrfs qgroups of the file system below, where they are enabled), auto (loop if DIR is in an image already, else fuse; says why). A \
                  directory that is in an image already goes on with loop where no other engine is named";
    let options = clap_args::options(|row| row.is_for(Taker::Cage))
        .into_iter()
        .map(|arg| if arg.get_id() == "engine" { arg.help(engine) } else { arg });
    Command::new("cage")
        .about("Limit what a directory may hold, in bytes and files")
        .after_help(
            "Examples:\n  nacre cage --size 10G /var/log/nginx\n  nacre cage --size 10G --inodes 100000 --soft 80% --on-soft 'logger cage' /srv/uploads\n  nacre cage --size 2G --when-full drop-oldest --keep 'audit*' /var/log\n  nacre cage --size 5G --limit user:www-data=2G --limit dir:tmp=1G /srv/data /mnt/data\n  nacre cage resize /var/log/nginx 20G\n  nacre cage status /var/log/nginx\n  nacre umount /var/log/nginx\n\nA directory whose name is that of a command is written with a slash: ./status",
        )
        .args_conflicts_with_subcommands(true)
        .subcommand_negates_reqs(true)
        .disable_help_subcommand(true)
        .arg(clap_args::path("DIR", "The directory to limit: an existing one; what is in it counts"))
        .arg(clap_args::path("MOUNTPOINT", "Where the limited directory is shown [default: over DIR itself]").required(false))
        // Accepted only so that too many paths get their own error message.
        .arg(clap_args::path("MORE", "").required(false).num_args(0..).action(ArgAction::Append).hide(true))
        .args(options)
        .subcommand(resize())
        .subcommand(status())
        .subcommand(list())
        .subcommand(remove())
}

fn resize() -> Command {
    Command::new("resize")
        .about("Change the limit of a cage while it is in use")
        .after_help(
            "Examples:\n  nacre cage resize /var/log/nginx 20G\n  nacre cage resize /var/log/nginx +5G\n  nacre cage resize /var/log/nginx --inodes 200000\n\nBelow what is used, the limit is taken all the same: nothing can grow until enough is deleted.",
        )
        .arg(clap_args::path("DIR", "Which cage"))
        .arg(clap_args::path("SIZE", "The new size, or +SIZE, -SIZE").required(false).required_unless_present("inodes").allow_hyphen_values(true))
        .arg(Arg::new("inodes").long("inodes").value_name("N|none").help("The new number of files, directories and links"))
}

fn status() -> Command {
    clap_args::view_arguments(Command::new("status"))
        .about("Show cages: limit, use, refused writes, engine and mode, the users who use most")
        .after_help("Examples:\n  nacre cage status\n  nacre cage status /var/log/nginx\n  nacre cage status --json\n  nacre cage status -H -p -o name,used,free")
        .arg(clap_args::path("DIR", "Which cages [default: all]").required(false).num_args(0..).action(ArgAction::Append))
}

fn list() -> Command {
    clap_args::view_arguments(Command::new("list"))
        .about("List cages")
        .after_help("Examples:\n  nacre cage list\n  nacre cage list -H -p -o name,limit,used")
}

fn remove() -> Command {
    Command::new("remove")
        .about("Give up a cage of the engines loop and quota: its image, or its quota")
        .after_help("Examples:\n  nacre cage remove --yes /var/log/nginx\n\nA cage of the engine fuse has nothing to remove: `nacre umount` ends it. Of an image, all content is lost.")
        .arg(Arg::new("yes").long("yes").action(ArgAction::SetTrue).help("Delete an image with everything in it"))
        .arg(clap_args::path("DIR", "Which cage"))
}

/// Parses the matched arguments of `nacre cage`.
///
/// # Errors
/// A value that does not fit, or options that cannot go together.
pub fn parse(matches: &ArgMatches) -> Result<Asked<CageVerb>, Failure> {
    let directory = |matches| PathBuf::from(clap_args::one(matches, "DIR"));
    Ok(match matches.subcommand() {
        None => {
            let given = clap_args::given(matches)?;
            let positionals = ["DIR", "MOUNTPOINT", "MORE"]
                .into_iter()
                .flat_map(|name| matches.get_many::<OsString>(name))
                .flatten()
                .cloned()
                .collect();
            Asked::Mount(plan::cage("nacre", Settings::fold(&given)?, &given, positionals)?)
        }
        Some(("resize", matches)) => {
            let text = |name: &str| matches.get_one::<String>(name).map(String::as_str);
            let size = matches
                .contains_id("SIZE")
                .then(|| clap_args::one(matches, "SIZE"))
                .map(|text| text.to_string_lossy().parse());
            Asked::Verb(CageVerb::Resize {
                directory: directory(matches),
                size: size.transpose()?,
                inodes: text("inodes").map(str::parse).transpose()?,
            })
        }
        Some(("status", matches)) => Asked::Verb(CageVerb::Status {
            view: clap_args::view(matches),
            directories: matches.get_many::<OsString>("DIR").into_iter().flatten().map(PathBuf::from).collect(),
        }),
        Some(("list", matches)) => Asked::Verb(CageVerb::List { view: clap_args::view(matches) }),
        Some(("remove", matches)) => {
            Asked::Verb(CageVerb::Remove { directory: directory(matches), yes: matches.get_flag("yes") })
        }
        Some((other, _)) => return Err(Failure::usage(format!("unknown command {other}"))),
    })
}
