//! What is generated from the table of commands: completion scripts and man pages.

use crate::commands;
use clap::Command;
use clap_complete::Shell;
use nacre_daemon::failure::Failure;
use std::{
    fs,
    io::{self, Write},
    path::Path,
};

/// Prints the completion script for a shell.
///
/// # Errors
/// Output that cannot be written.
pub fn completions(shell: Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut commands::table(), "nacre", &mut script);
    io::stdout().lock().write_all(&script).map_err(|error| Failure::io("cannot write", "the script", &error))
}

/// Writes one page per command into a directory; answers their names.
///
/// # Errors
/// A file that cannot be written.
pub fn man(directory: &Path) -> Result<Vec<String>, Failure> {
    let mut table = commands::table();
    table.build();
    let mut names = vec![page(&table, "nacre".to_owned(), directory)?];
    pages(&table, "nacre", directory, &mut names)?;
    Ok(names)
}

/// The pages of the commands of a command.
fn pages(of: &Command, name: &str, directory: &Path, names: &mut Vec<String>) -> Result<(), Failure> {
    for command in of.get_subcommands().filter(|command| command.get_name() != "help" && !command.is_hide_set()) {
        let name = format!("{name}-{}", command.get_name());
        names.push(page(command, name.clone(), directory)?);
        pages(command, &name, directory, names)?;
    }
    Ok(())
}

fn page(command: &Command, name: String, directory: &Path) -> Result<String, Failure> {
    let file = directory.join(format!("{name}.1"));
    let mut text = Vec::new();
    let page = clap_mangen::Man::new(command.clone().name(name.clone()).disable_help_subcommand(true)).title(name);
    let written = page.render(&mut text).and_then(|()| fs::write(&file, text));
    written.map_err(|error| Failure::io("cannot write", file.display(), &error)).map(|()| file.display().to_string())
}
